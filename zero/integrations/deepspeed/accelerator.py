"""The object that `deepspeed.accelerator.get_accelerator()` returns: this rank's compute device,
under DeepSpeed's names.

That is torch's accelerator, or the CPU if torch sees none. A CPU has no index, no memory of its
own, and nothing to wait for. `zero.comm.world` decides which device the engine takes."""

from __future__ import annotations

from functools import cache
from typing import Any

import psutil
import torch

from zero.comm import world
from zero.device import CPU, memory_in_use, peak_memory

# What `torch.cpu` does not have. Each may be called with a device.
_ON_CPU: dict[str, Any] = {
    **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_: memory_in_use(CPU)),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda *_: peak_memory(CPU)),
    **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda *_: None),
    **dict.fromkeys(("range_push", "range_pop"), lambda *_: None),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "initial_seed": torch.initial_seed,
    "available_memory": lambda *_: psutil.virtual_memory().available,
}
# DeepSpeed's questions that ask whether the device finishes each operation at once, as a CPU does.
_WAITS = {
    "handles_memory_backpressure",
    "is_synchronized_device",
    "resolves_data_dependency",
    "use_host_timers",
}


class Accelerator:
    """This rank's device, under the names that scripts use."""

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
        """The backend of `torch.distributed` for this rank's device."""
        return world.default_backend(self.device())

    # A model can be trained in either, on every device.
    is_bf16_supported = is_fp16_supported = staticmethod(lambda *_: True)

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which a model can be trained."""
        return [torch.float, torch.half, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on this kind of device."""
        return tensor.device.type == self.device_name()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in host memory that the device can read; on a CPU the tensor itself."""
        return tensor if self.device_name() == "cpu" else tensor.pin_memory()

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory."""
        if self.device_name() == "cpu":
            return psutil.virtual_memory().total
        return torch.get_device_module().get_device_properties(device_index).total_memory

    def __getattr__(self, name: str) -> Any:
        """torch's function of this name for the kind of device, such as `synchronize`."""
        is_cpu = self.device_name() == "cpu"
        if name in _WAITS:
            return lambda: is_cpu
        if is_cpu and (name in _ON_CPU or name.endswith("Tensor")):  # such as FloatTensor
            return _ON_CPU.get(name) or getattr(torch, name)
        module = torch.get_device_module(self.device_name())
        if name.startswith("_") or not hasattr(module, name):
            raise AttributeError(f"get_accelerator().{name} is not provided by zero")
        return getattr(module, name)


@cache
def get_accelerator() -> Accelerator:
    """The process's one `Accelerator`."""
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    """True: every device of torch is."""
    return True
