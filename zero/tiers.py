"""Where shards live: the compute device, or host memory (pinned when there is a GPU to copy to)."""

from __future__ import annotations

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
