"""The object that `deepspeed.accelerator.get_accelerator()` returns: this rank's compute device,
under DeepSpeed's names.

That is torch's accelerator, or the CPU if torch sees none. A CPU has no index, no memory of its
own, and nothing to wait for. `zero.comm.world` decides which device the engine takes."""

from __future__ import annotations

from functools import cache

import torch


class Accelerator:
    """This rank's device, by the few names that others use; `torch.accelerator` has all else."""

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


@cache
def get_accelerator() -> Accelerator:
    """The process's one `Accelerator`."""
    return Accelerator()
