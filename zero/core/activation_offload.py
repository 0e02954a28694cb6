"""Activations in host memory between forward and backward: the `activation_checkpointing` section.

`cpu_checkpointing` needs no change of the model. Every tensor that autograd saves during the
engine's forward is copied to host memory, pinned if there is a GPU, and back when backward needs
it. (With gradient checkpointing those are the inputs of the checkpointed blocks and little else.)
Operations that save the same memory share the copies. So values, strides and gradients stay the
same. The host waits for no copy: copies are among the kernels of the stream that saves. Views of
unsharded parameters are not copied: the schedule decides about their memory. The other keys of the
section cut or pack activations over model-parallel ranks. This file knows nothing of hooks or
gathering."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.comm.traffic import note_copy
from zero.core.param_group import ParamGroup
from zero.device import compute_stream, is_accelerator
from zero.offload.pinned import HostMemory

# Smaller tensors (scalars, statistics of norms) are not worth a transfer.
MIN_BYTES = 1 << 14


class _Kept:
    """A copy of a region of device memory: in host memory until it is needed, then on the device
    until it is dropped.

    Each operation that has saved the region refers to it, and drops it after its backward.
    """

    def __init__(self, region: torch.Tensor, memory: HostMemory):
        self._device = region.device
        host = memory.like(region)
        note_copy(host, region)
        self._values = host.copy_(region, non_blocking=True)

    def back(self) -> torch.Tensor:
        if self._values.device != self._device:
            host, self._values = self._values, self._values.to(self._device, non_blocking=True)
            note_copy(self._values, host)
        return self._values


class _Packed(NamedTuple):
    """What autograd saves in place of a tensor: the copy, the tensor's shape, and its stride if the
    copy is flat.
    """

    kept: _Kept
    shape: torch.Size
    stride: tuple[int, ...] | None


class _PackedParts(NamedTuple):
    """The same for a tensor made of others, such as a `DTensor`: what `__tensor_unflatten__`
    needs.
    """

    kind: type
    parts: dict[str, Any]
    rest: object
    shape: torch.Size
    stride: tuple[int, ...]


class HostActivations:
    """Makes contexts in which saved tensors of `device` live on the host; counts `moved_bytes`.

    Args:
        groups: the groups whose unsharded buffers are not copied.
    """

    def __init__(self, device: torch.device, groups: Sequence[ParamGroup]):
        self.device = device
        self.groups = groups
        # For each stream, because a stream orders the last copy from a buffer and the next one to
        # it. (torch's pinned memory would be up to twice as large.)
        self._memory: defaultdict[torch.Stream | None, HostMemory] = defaultdict(
            partial(HostMemory, pin=is_accelerator(device))
        )
        self.moved_bytes = 0
        self._weights: set[int] = set()
        self._kept: WeakValueDictionary[tuple, _Kept] = WeakValueDictionary()

    @contextmanager
    def context(self) -> Iterator[None]:
        """For one forward; backward may come after it."""
        self._weights = {group.full.untyped_storage()._cdata for group in self.groups}
        self._kept = (
            WeakValueDictionary()
        )  # between forwards memory may change without a new version
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(
        self, tensor: Any, versions: tuple[int, ...] = ()
    ) -> torch.Tensor | _Packed | _PackedParts:
        """`versions`: of the tensors that this one is a part of."""
        if hasattr(tensor, "trigger_wait"):  # the result of a functional collective
            tensor = tensor.trigger_wait()
        is_wrapper = bool(is_traceable_wrapper_subclass(tensor))
        if tensor.device != self.device or not (is_wrapper or _is_plain(tensor)):
            return tensor
        if tensor.nbytes < MIN_BYTES or self._is_parameter(tensor):
            return tensor
        tensor, versions = tensor.detach(), (*versions, tensor._version)
        if is_wrapper:
            names, rest = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            packed = {
                n: self._pack(p, versions) if isinstance(p, torch.Tensor) else p
                for n, p in parts.items()
            }
            return _PackedParts(type(tensor), packed, rest, tensor.shape, tensor.stride())
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        # Others: an expanded tensor, or a lazy conjugate, whose values are not those of the region.
        lazy = tensor.is_conj(), tensor.is_neg()
        is_dense = extent <= tensor.numel() and not any(lazy)
        region = tensor.as_strided((extent,), (1,)) if is_dense else tensor
        # The weak reference keeps the address of the storage from being used for another one. A
        # stream orders its own copies only; autograd runs an operation's backward on the stream of
        # its forward.
        stream = compute_stream(self.device) if is_accelerator(self.device) else None
        key = (
            StorageWeakRef(region.untyped_storage()),
            region.storage_offset(),
            region.shape,
            region.stride(),
        )
        key = *key, region.dtype, lazy, versions, stream
        if (kept := self._kept.get(key)) is None:
            self._kept[key] = kept = _Kept(region, self._memory[stream])
            self.moved_bytes += region.nbytes
        return _Packed(kept, tensor.shape, tensor.stride() if is_dense else None)

    def _unpack(self, packed: torch.Tensor | _Packed | _PackedParts) -> torch.Tensor:
        if isinstance(packed, _Packed):
            values = packed.kept.back()
            return (
                values if packed.stride is None else values.as_strided(packed.shape, packed.stride)
            )
        if isinstance(packed, _PackedParts):
            parts = {name: self._unpack(part) for name, part in packed.parts.items()}
            return packed.kind.__tensor_unflatten__(parts, packed.rest, packed.shape, packed.stride)
        return packed

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        return (
            isinstance(tensor, torch.nn.Parameter)
            or tensor.untyped_storage()._cdata in self._weights
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether all values are in one storage: not so for sparse and nested tensors."""
    return tensor.layout == torch.strided and not tensor.is_nested
