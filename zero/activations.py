"""Activations in host memory between forward and backward: the `activation_checkpointing` section.

`cpu_checkpointing` needs no change of the model. Every tensor that autograd saves during the engine's forward is copied
to host memory, pinned if there is a GPU, and back when backward needs it. (With gradient checkpointing those are the
inputs of the checkpointed blocks and little else.) So values and gradients keep the same bits. Views of unsharded
parameters are not copied: the schedule decides about their memory. The other keys of the section cut or pack
activations over model-parallel ranks, of which there are none here. This file knows nothing of hooks or gathering.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks

from zero.device import is_accelerator
from zero.unit import Unit

# Smaller tensors (scalars, statistics of norms) are not worth a transfer.
MIN_BYTES = 1 << 14


class HostActivations:
    """Makes contexts in which saved tensors of `device` live on the host; counts `moved_bytes`.

    Args: units: their unsharded buffers are not copied.
    """

    def __init__(self, device: torch.device, units: Sequence[Unit]):
        self.device, self.units = device, units
        self.moved_bytes = 0

    def context(self) -> contextlib.AbstractContextManager:
        """For one forward; backward may come after it."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
        if tensor.device != self.device or tensor.nbytes < MIN_BYTES or self._is_parameter(tensor):
            return tensor
        pinned = is_accelerator(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned)
        self.moved_bytes += tensor.nbytes
        return tensor.device, host.copy_(tensor)

    @staticmethod
    def _unpack(packed: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True, copy=True)

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return isinstance(tensor, torch.nn.Parameter) or any(
            unit.full.untyped_storage().data_ptr() == storage for unit in self.units
        )
