"""What `deepspeed.accelerator.get_accelerator()` returns: the device that this rank computes on, by
DeepSpeed's names.

That is torch's accelerator, or the CPU if torch sees none. A CPU has no index, no memory of its
own, and nothing to wait for. `zero.comm.world` decides which device the engine takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from zero.comm import world


class Accelerator:
    """This rank's device. Names that are not here are those of `torch.accelerator`; on a CPU
    `memory_allocated` and the like are 0, and `synchronize` and `empty_cache` do nothing.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not hasattr(torch.accelerator, name):
            raise AttributeError(
                f"get_accelerator().{name} is not provided by zero", name=name, obj=self
            )
        if torch.accelerator.is_available():
            return getattr(torch.accelerator, name)
        return lambda *args, **kwargs: 0

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | str | None = None) -> str:
        """The kind of device ("cuda", "cpu"), or with an index that device ("cuda:1", "cpu")."""
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            return "cpu"
        return device.type if device_index is None else f"{device.type}:{device_index}"

    def current_device(self) -> int:
        """The index of this rank's device; 0 on a CPU."""
        available = torch.accelerator.is_available()
        return torch.accelerator.current_device_index() if available else 0

    def current_device_name(self) -> str:
        """This rank's device, as `torch.device` takes it: "cuda:0", "cpu"."""
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> torch.device:
        """This rank's device, or the one with this index; also a context of torch."""
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        """The backend of `torch.distributed` for this device: "nccl" or "gloo"."""
        return world.default_backend(self.device())


@cache
def get_accelerator() -> Accelerator:
    """The process's one `Accelerator`."""
    return Accelerator()
