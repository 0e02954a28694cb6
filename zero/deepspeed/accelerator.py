"""What `deepspeed.accelerator.get_accelerator()` returns: this rank's device, by name."""

from __future__ import annotations

import os

import torch


class Accelerator:
    """The device this rank computes on: its CUDA device where torch sees one, the CPU elsewhere."""

    @property
    def _name(self) -> str:
        return self.device_name()

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """The kind of device ("cuda", "cpu"), or with an index that device ("cuda:1"; a CPU has no index)."""
        if not torch.cuda.is_available():
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device(self) -> int:
        """The index of this rank's device; 0 on a CPU."""
        return torch.cuda.current_device() if torch.cuda.is_available() else 0

    def current_device_name(self) -> str:
        """This rank's device, as `torch.device` takes it: "cuda:0", "cpu"."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """GPUs of this host; on a CPU, its ranks as the launcher counts them: DeepSpeed's by LOCAL_SIZE."""
        if torch.cuda.is_available():
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def set_device(self, device_index: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(device_index)

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def is_bf16_supported(self) -> bool:
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16; CPUs without such instructions only emulate it, very slowly."""
        return torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_fp16_supported()

    def supported_dtypes(self) -> list[torch.dtype]:
        wanted = {torch.float16: self.is_fp16_supported(), torch.bfloat16: self.is_bf16_supported()}
        return [torch.float32, *(dtype for dtype, supported in wanted.items() if supported)]

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device; a CPU is never behind."""
        if torch.cuda.is_available():
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of device memory in tensors; 0 on a CPU."""
        return torch.cuda.memory_allocated(device_index) if torch.cuda.is_available() else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that `memory_allocated` has been, in bytes."""
        return torch.cuda.max_memory_allocated(device_index) if torch.cuda.is_available() else 0

    def manual_seed_all(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed) if torch.cuda.is_available() else torch.manual_seed(seed)

    def communication_backend_name(self) -> str:
        """The backend of `torch.distributed` for this device: "nccl" or "gloo"."""
        return "nccl" if torch.cuda.is_available() else "gloo"


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """The process's one `Accelerator`."""
    return _ACCELERATOR


def is_current_accelerator_supported() -> bool:
    return True
