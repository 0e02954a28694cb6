"""What `deepspeed.accelerator.get_accelerator()` returns: the device that this rank computes on, by
DeepSpeed's names.

That is torch's accelerator, or the CPU if torch sees none. A CPU has no index, no memory of its
own, and nothing to wait for. `zero.comm.communicator` decides which device the engine takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from zero.comm import world

_has_accelerator = torch.accelerator.is_available


class Accelerator:
    """This rank's device.

    `synchronize`, `empty_cache`, `memory_allocated` and `max_memory_allocated` (bytes) are torch's;
    0 on a CPU."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ("synchronize", "empty_cache", "memory_allocated", "max_memory_allocated"):
            raise AttributeError(
                f"get_accelerator().{name} is not provided by zero", name=name, obj=self
            )
        return getattr(torch.accelerator, name) if _has_accelerator() else lambda *args, **kwargs: 0

    @property
    def _name(self) -> str:
        return self.device_name()

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """The kind of device ("cuda", "cpu"), or with an index that device ("cuda:1", "cpu")."""
        kind = torch.accelerator.current_accelerator().type if _has_accelerator() else "cpu"
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device(self) -> int:
        """The index of this rank's device; 0 on a CPU."""
        return torch.accelerator.current_device_index() if _has_accelerator() else 0

    def current_device_name(self) -> str:
        """This rank's device, as `torch.device` takes it: "cuda:0", "cpu"."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Accelerators of this host.

        On a CPU, the ranks of this host: `LOCAL_SIZE`, else `LOCAL_WORLD_SIZE`.
        """
        if _has_accelerator():
            return torch.accelerator.device_count()
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def set_device(self, device_index: int) -> None:
        if _has_accelerator():
            torch.accelerator.set_device_index(device_index)

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def is_bf16_supported(self) -> bool:
        asked = getattr(torch.get_device_module(self._name), "is_bf16_supported", None)
        return asked is None or asked()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16;

        CPUs without such instructions only emulate it, very slowly.
        """
        return _has_accelerator() or torch.ops.mkldnn._is_mkldnn_fp16_supported()

    def supported_dtypes(self) -> list[torch.dtype]:
        wanted = {torch.float16: self.is_fp16_supported(), torch.bfloat16: self.is_bf16_supported()}
        return [torch.float32, *(dtype for dtype, supported in wanted.items() if supported)]

    def manual_seed_all(self, seed: int) -> None:
        torch.get_device_module(self._name).manual_seed_all(
            seed
        ) if _has_accelerator() else torch.manual_seed(seed)

    def communication_backend_name(self) -> str:
        """The backend of `torch.distributed` for this device: "nccl" or "gloo"."""
        return world.default_backend(self.device())


@cache
def get_accelerator() -> Accelerator:
    """The process's one `Accelerator`."""
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    return True
