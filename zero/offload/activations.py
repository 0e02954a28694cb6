"""Activations in host memory or in a file between forward and backward: the section
`activation_checkpointing`.

`cpu_checkpointing` and `nvme_path` need no change of the model. Every tensor that autograd saves
during the engine's forward is copied to host memory, pinned if there is a GPU, and back when
backward needs it. (With gradient checkpointing those are the inputs of the checkpointed blocks and
little else.) Operations that save the same memory share the copies. So values, strides and
gradients stay the same. Copies run beside computation, in a stream of their own: of those to the
host, computation waits for all but the last two, and backward brings each tensor back while it uses
the one that was saved after it. With a file, the host also waits while two pieces are written.
Views of weights are not copied: the core decides about their memory. The other keys of the section
cut or pack activations over model-parallel ranks. This file knows nothing of groups, hooks or
gathering."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.comm.traffic import note_copy
from zero.comm.work import Pending
from zero.device import compute_stream, is_accelerator, new_stream
from zero.offload.nvme import Transfer
from zero.offload.pinned import HostMemory
from zero.offload.tiers import Tier

# Smaller tensors (scalars, statistics of norms) are not worth a transfer.
MIN_BYTES = 1 << 14
# Bytes that move to or from a file as one, and the number of such pieces, or of tensors that are
# copied to the host, on their way.
_PIECE, _IN_FLIGHT = 1 << 26, 2


class _Copies:
    """Copies between a device and host memory, beside the device's computation. All of one device
    run one after the other, which is what allows their host buffers to be used again.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._memory = HostMemory(pin=is_accelerator(device))
        self._stream = new_stream(device) if is_accelerator(device) else None
        # Regions that are being copied out, which would be overwritten if they were freed: the
        # stream that computed each, and the end of its copy.
        self._leaving: deque[tuple[torch.Tensor, torch.Stream, torch.Event]] = deque()

    def out(self, region: torch.Tensor) -> torch.Tensor:
        host = self._memory.like(region)
        note_copy(host, region)
        if self._stream is None:
            return host.copy_(region)
        computes = compute_stream(self._device)
        self._stream.wait_event(computes.record_event())
        with self._stream:
            host.copy_(region, non_blocking=True)
        self._leaving.append((region, computes, self._stream.record_event()))
        self.wait_until_left(_IN_FLIGHT)
        return host

    def wait_until_left(self, but: int = 0) -> None:
        """What is computed from now on comes after the copies out, except for the last ones."""
        while len(self._leaving) > but:
            _, computes, left = self._leaving.popleft()
            computes.wait_event(left)

    def back(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
        """Start to copy to the device: the values, and an event at the end of the copy."""
        values = torch.empty_like(host, device=self._device)
        note_copy(values, host)
        if self._stream is None:
            return values.copy_(host), None
        self._stream.wait_event(compute_stream(self._device).record_event())
        with self._stream:
            values.copy_(host, non_blocking=True)
        values.record_stream(self._stream)  # a graph may be freed without its backward
        return values, self._stream.record_event()


class _Kept:
    """A copy of a region of device memory: in host memory until it is needed, then on the device
    until it is dropped.

    Each operation that has saved the region refers to it, and drops it after its backward.

    Args:
        before: returns the one that was saved before this one, which backward needs next.
    """

    def __init__(self, region: torch.Tensor, copies: _Copies, before: _Before):
        self._copies, self._before = copies, before
        self._host: torch.Tensor | None = copies.out(region)
        self._values: torch.Tensor | None = None
        self._arrived: torch.Event | None = None

    def fetch(self) -> None:
        """Start to bring the values back."""
        if self._host is not None:
            self._values, self._arrived = self._copies.back(self._host)
            self._host = None

    def back(self) -> torch.Tensor:
        self.fetch()
        assert self._values is not None
        if self._arrived is not None:
            compute_stream(self._values.device).wait_event(self._arrived)
            if (before := self._before()) is not None:
                before.fetch()
        return self._values


class _KeptInFile:
    """The same in a file, without a copy on the device until it is needed.

    Values move in pieces, so that host memory holds only a few pieces at a time.

    Args:
        region: the values.
        tier: has the file.
        memory: buffers for the way out.
        in_flight: all writes that may not have ended, of this and of other tensors.
        before: returns the one that was saved before this one, which backward needs next.
    """

    def __init__(
        self,
        region: torch.Tensor,
        tier: Tier,
        memory: HostMemory,
        in_flight: deque[Transfer],
        before: _Before,
    ):
        self._tier, self._before = tier, before
        self._shape, self._device = region.shape, region.device
        self._home = tier.empty(region.numel(), region.dtype)
        self._values: torch.Tensor | None = None
        self._to_read: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._reads: deque[Pending] = deque()
        self._writes: list[Transfer] = []
        assert tier.file is not None
        for target, values in self._pieces(region.reshape(-1)):
            while len(in_flight) >= _IN_FLIGHT:
                in_flight.popleft().wait()
            # Copied among the kernels of this stream: the model may then change the values in
            # place.
            staged = memory.like(values)
            note_copy(staged, values)
            staged.copy_(values, non_blocking=True)
            arrived = None
            if is_accelerator(self._device):
                arrived = compute_stream(self._device).record_event().synchronize
            self._writes.append(tier.file.write(target, staged, after=arrived))
            in_flight.append(self._writes[-1])

    def _pieces(self, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        numel = _PIECE // values.itemsize
        return zip(self._home.split(numel), values.split(numel), strict=True)

    def fetch(self) -> None:
        """Start to bring the values back."""
        if self._values is None:
            for write in self._writes:
                write.wait()
            self._values = torch.empty(self._shape, dtype=self._home.dtype, device=self._device)
            self._to_read.extend(self._pieces(self._values.view(-1)))
            self._read_on()

    def back(self) -> torch.Tensor:
        self.fetch()
        if (before := self._before()) is not None:
            before.fetch()
        while self._reads:
            self._reads.popleft().wait()
            self._read_on()
        assert self._values is not None
        return self._values

    def _read_on(self) -> None:
        while self._to_read and len(self._reads) < _IN_FLIGHT:
            home, values = self._to_read.popleft()
            self._reads.append(self._tier.load(values, home))


_Before = Callable[[], "_Kept | _KeptInFile | None"]


class _Packed(NamedTuple):
    """What autograd saves in place of a tensor: the copy, the tensor's shape, and its stride if the
    copy is flat; and the tensor without its memory, which counts the changes in place, and their
    number so far.
    """

    kept: _Kept | _KeptInFile
    shape: torch.Size
    stride: tuple[int, ...] | None
    counter: torch.Tensor
    version: int


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

    `tier`: large ones are kept in its file, if it has one.
    """

    def __init__(self, device: torch.device, tier: Tier | None = None):
        self.device = device
        self._tier = tier or Tier(torch.device("cpu"))
        self._in_flight: deque[Transfer] = deque()
        self._copies = _Copies(device)
        self._latest: _Before = lambda: None
        # On the way to a file. For each stream, because a stream orders the last copy from a buffer
        # and the next one to it. (torch's pinned memory would be up to twice as large.)
        self._memory: defaultdict[torch.Stream | None, HostMemory] = defaultdict(
            partial(HostMemory, pin=is_accelerator(device))
        )
        self.moved_bytes = 0
        self._weights: set[int] = set()
        self._kept: WeakValueDictionary[tuple, _Kept | _KeptInFile] = WeakValueDictionary()

    @contextmanager
    def context(self, weights: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """For one forward; backward may come after it. `weights`: buffers that are not copied."""
        self._weights = {buffer.untyped_storage()._cdata for buffer in weights}
        # Between forwards memory may change without a new version.
        self._kept = WeakValueDictionary()
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._copies.wait_until_left()

    def _pack(
        self, tensor: Any, versions: tuple[int, ...] = ()
    ) -> torch.Tensor | _Packed | _PackedParts:
        """`versions`: of the tensors that this one is a part of."""
        if hasattr(tensor, "trigger_wait"):  # the result of a functional collective
            tensor = tensor.trigger_wait()
        is_wrapper = bool(is_traceable_wrapper_subclass(tensor))
        # Else not all values are in one storage: of sparse and nested tensors.
        is_plain = tensor.layout == torch.strided and not tensor.is_nested
        if tensor.device != self.device or not (is_wrapper or is_plain):
            return tensor
        if tensor.nbytes < MIN_BYTES or self._is_weight(tensor):
            return tensor
        is_on_host = not is_accelerator(self.device) and self._tier.file is not None
        if is_on_host and not self._tier.puts_in_file(tensor.nbytes):
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
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in strides)
        # Others: an expanded tensor, or a lazy conjugate, whose values are not those of the region.
        lazy = tensor.is_conj(), tensor.is_neg()
        is_dense = extent <= tensor.numel() and not any(lazy)
        region = tensor.as_strided((extent,), (1,)) if is_dense else tensor
        # The weak reference keeps the address of the storage from being used for another one. A
        # stream orders its own copies only; autograd runs an operation's backward on the stream of
        # its forward.
        stream = compute_stream(self.device) if is_accelerator(self.device) else None
        storage = StorageWeakRef(region.untyped_storage())
        key = storage, region.storage_offset(), region.shape, region.stride()
        key = *key, region.dtype, lazy, versions, stream
        if (kept := self._kept.get(key)) is None:
            self._kept[key] = kept = self._keep(region, self._memory[stream])
            self.moved_bytes += region.nbytes
        version = tensor._version
        counter = tensor.detach()
        counter.data = tensor.new_empty(0)
        stride = tensor.stride() if is_dense else None
        return _Packed(kept, tensor.shape, stride, counter, version)

    def _keep(self, region: torch.Tensor, memory: HostMemory) -> _Kept | _KeptInFile:
        if self._tier.puts_in_file(region.nbytes):
            kept = _KeptInFile(region, self._tier, memory, self._in_flight, self._latest)
        else:
            kept = _Kept(region, self._copies, self._latest)
        self._latest = weakref.ref(kept)
        return kept

    def _unpack(self, packed: torch.Tensor | _Packed | _PackedParts) -> torch.Tensor:
        if isinstance(packed, _Packed):
            if packed.counter._version != packed.version:
                raise RuntimeError(
                    f"a tensor of shape {list(packed.shape)} that backward needs has been modified "
                    "by an inplace operation after it was saved, which plain torch forbids, too"
                )
            values = packed.kept.back()
            stride = packed.stride
            return values if stride is None else values.as_strided(packed.shape, stride)
        if isinstance(packed, _PackedParts):
            parts = {name: self._unpack(part) for name, part in packed.parts.items()}
            return packed.kind.__tensor_unflatten__(parts, packed.rest, packed.shape, packed.stride)
        return packed

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        is_shown = tensor.untyped_storage()._cdata in self._weights
        return is_shown or isinstance(tensor, torch.nn.Parameter)
