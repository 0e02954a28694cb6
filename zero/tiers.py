"""Where shards live: the compute device, or host memory (pinned when there is a GPU to copy to)."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tier:
    """A place for shards. On a machine whose compute device is the CPU, the host tier is the device itself."""

    device: torch.device
    pinned: bool = False

    @classmethod
    def of(cls, offload_device: str, pin_memory: bool, compute_device: torch.device) -> Tier:
        """The tier that `offload_param` or `offload_optimizer` asks for: `offload_device` is "none" or "cpu"."""
        if offload_device == "none" or compute_device.type == "cpu":
            return cls(compute_device)
        return cls(torch.device("cpu"), pinned=pin_memory)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.empty(numel, dtype).zero_()


class HostTrimmer:
    """Gives freed host memory back to the system while a model is built or loaded.

    glibc raises its mmap threshold as large blocks are freed, serves the next ones from the heap, and shards that stay
    come to lie between gathered buffers that go: what was freed is never returned. A building of 1B parameters held
    1.9 GiB too much for that (benchmarks/LOG.md). Elsewhere than on glibc this does nothing.
    """

    def __init__(self, every: int = 1 << 25):
        self.every, self.freed = every, 0
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._trim = getattr(library, "malloc_trim", None)

    def freed_elements(self, numel: int) -> None:
        """Count `numel` elements freed; trim after each `every` of them."""
        self.freed += numel
        if self.freed >= self.every and self._trim is not None:
            self.freed = 0
            self._trim(0)
