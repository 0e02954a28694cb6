"""What `deepspeed.accelerator.get_accelerator()` returns: this rank's device, by name."""

from __future__ import annotations

import torch


class Accelerator:
    """The device this rank computes on: its CUDA device where torch sees one, the CPU elsewhere."""

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
        return torch.cuda.device_count() if torch.cuda.is_available() else 1

    def communication_backend_name(self) -> str:
        """The backend of `torch.distributed` for this device: "nccl" or "gloo"."""
        return "nccl" if torch.cuda.is_available() else "gloo"


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """The process's one `Accelerator`."""
    return _ACCELERATOR
