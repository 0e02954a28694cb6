"""Where shards live: the compute device, host memory (pinned if there is an accelerator to copy
to), or a file.

This file does not know what the tensors mean.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections import deque
from dataclasses import dataclass

import torch

from zero.comm.traffic import begin, note_copy
from zero.comm.work import Pending
from zero.config import AioConfig, OffloadConfig
from zero.device import compute_stream, is_accelerator, new_stream
from zero.offload.nvme import ScratchFile
from zero.offload.pinned import PAGE, HostMemory, new_block, round_up

# With the file tier, a tensor of fewer bytes stays in host memory: a transfer would not pay. For
# the moments of sub-groups the bytes of the whole master count.
LEAST_BYTES_IN_A_FILE = 1 << 20

_files: dict[tuple[str, int, int, int], ScratchFile] = {}


def scratch_file(folder: str, aio: AioConfig) -> ScratchFile:
    """This process's file in `folder`, which all engines share."""
    key = (os.path.abspath(folder), aio.block_size, aio.queue_depth, aio.thread_count)
    if key not in _files:
        _files[key] = ScratchFile(folder, aio)
    return _files[key]


def trim() -> None:
    """Give memory and space on disk that no tensor needs any more back to the system."""
    _staging.trim()
    for file in _files.values():
        file.trim()


@dataclass(frozen=True)
class Tier:
    """A place for 1-D tensors. On a machine whose compute device is the CPU, the host tier is the
    device itself.

    A tensor in `file` is mapped memory, which any code may read and write; `load` and `store` are
    the fast way."""

    device: torch.device
    pinned: bool = False
    file: ScratchFile | None = None

    @classmethod
    def of(
        cls, offload: OffloadConfig | None, aio: AioConfig, compute_device: torch.device
    ) -> Tier:
        """The tier that `offload_param` or `offload_optimizer` asks for.

        Raises UsageError for an unusable path.
        """
        if offload is None or offload.device == "none":
            return cls(compute_device)
        pinned = offload.pin_memory and is_accelerator(compute_device)
        folder = offload.nvme_path if offload.device == "nvme" else None
        file = None if folder is None else scratch_file(folder, aio)
        return cls(torch.device("cpu"), pinned, file)

    @property
    def is_accelerator(self) -> bool:
        return self.device.type != "cpu"

    def in_memory(self) -> Tier:
        """This tier, with host memory in place of its file."""
        return Tier(self.device, self.pinned)

    def holds_in_file(self, tensor: torch.Tensor) -> bool:
        return self.file is not None and self.file.holds(tensor)

    def puts_in_file(self, nbytes: int) -> bool:
        return self.file is not None and nbytes >= LEAST_BYTES_IN_A_FILE

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor (numel,) on this tier. It may hold anything."""
        if self.file is not None and self.puts_in_file(numel * dtype.itemsize):
            return self.file.empty(numel, dtype)
        if self.pinned and numel:
            # Not torch's pinned memory, which rounds sizes up to powers of two.
            block = new_block(round_up(numel * dtype.itemsize, PAGE), pin=True)
            return torch.frombuffer(block, dtype=dtype, count=numel)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.file is not None and self.puts_in_file(numel * dtype.itemsize):
            return self.file.zeros(numel, dtype)
        return self.empty(numel, dtype).zero_()

    def keep(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of `values` (1-D) on this tier, in `dtype` or their own."""
        kept = self.empty(values.numel(), dtype or values.dtype)
        self.store(kept, values).wait()
        return kept

    def store(self, target: torch.Tensor, values: torch.Tensor) -> Pending:
        """Start to write `values` to `target`, a tensor of this tier.

        Do not change `values` before the end.
        """
        file = self.file if self.holds_in_file(target) else None
        if file is None:
            used = begin("store", values)
            return _copy(target, values).observed_by(used)
        if is_accelerator(values.device):
            staged = _staging.like(target)
            arrival = _copy_out(staged, values)
            return Pending([file.write(target, staged, after=arrival.wait)])
        values = values.to(target.dtype)
        return Pending([file.write(target, values)], keep=(values,))

    def load(self, target: torch.Tensor, source: torch.Tensor, lasts: bool = True) -> Pending:
        """Start to read `source`, a tensor of this tier, into `target`, which is on the host or the
        compute device.

        `lasts`: `source` stays as it is; else it is a buffer of `HostMemory`, which is not used
        again before the end.
        """
        file = self.file if self.holds_in_file(source) else None
        if not lasts and is_accelerator(target.device):
            _copy_in(target, source, compute_stream(target.device).record_event())
            return Pending()
        if file is None:
            used = begin("load", source)
            note_copy(target, source)
            target.copy_(source, non_blocking=True)
            return Pending().observed_by(used)
        if target.device.type == "cpu":
            return Pending([file.read(source, target)])
        staged, ready = _staging.like(source), compute_stream(target.device).record_event()
        return Pending([file.read(source, staged)], lambda: _copy_in(target, staged, ready))


class _Staging:
    """Pinned buffers between files and accelerators.

    At most `_COPIES_IN` of them wait for a copy to a device.
    """

    def __init__(self) -> None:
        self._memory = HostMemory(pin=True)
        self._lock = threading.Lock()
        self._copies: deque[tuple[torch.Event, torch.Tensor]] = deque()

    def like(self, source: torch.Tensor) -> torch.Tensor:
        """A free buffer with the dtype and the shape of `source`."""
        with self._lock:
            while self._copies and (len(self._copies) >= _COPIES_IN or self._copies[0][0].query()):
                self._copies.popleft()[0].synchronize()
        return self._memory.like(source)

    def trim(self) -> None:
        with self._lock:
            while self._copies:
                self._copies.popleft()[0].synchronize()
        self._memory.trim()

    def keep_until(self, copied: torch.Event, buffer: torch.Tensor) -> None:
        """Do not use `buffer` again before this event."""
        with self._lock:
            self._copies.append((copied, buffer))


_COPIES_IN = 2
_staging = _Staging()


@functools.cache
def _copy_stream(device: torch.device, direction: str) -> torch.Stream:
    """Each direction has a stream of its own: a device copies both ways at the same time."""
    return new_stream(device)


def _copy_in(target: torch.Tensor, staged: torch.Tensor, ready: torch.Event) -> None:
    """Copy to the device beside its computation, after `ready`. What the caller's stream gets from
    now on comes later.

    The host does not wait.
    """
    note_copy(target, staged)
    stream = _copy_stream(target.device, "in")
    stream.wait_event(ready)
    with stream:
        target.copy_(staged, non_blocking=True)
    copied = stream.record_event()
    compute_stream(target.device).wait_event(copied)
    _staging.keep_until(copied, staged)


def _copy(target: torch.Tensor, values: torch.Tensor) -> Pending:
    """Start to copy `values` to `target`, neither of which is in a file."""
    if is_accelerator(values.device) and target.is_pinned():
        return _copy_out(target, values)
    note_copy(target, values)
    if is_accelerator(target.device) and values.is_pinned():
        target.copy_(values, non_blocking=True)
        return Pending((), compute_stream(target.device).record_event().synchronize, (values,))
    target.copy_(values)
    return Pending()


def _copy_out(target: torch.Tensor, values: torch.Tensor) -> Pending:
    """Start to copy from the device to pinned host memory beside the device's computation."""
    note_copy(target, values)
    stream = _copy_stream(values.device, "out")
    stream.wait_stream(compute_stream(values.device))
    with stream:
        target.copy_(values, non_blocking=True)
    values.record_stream(stream)
    return Pending((), stream.record_event().synchronize, (values,))


class HostTrimmer:
    """Gives freed host memory back to the system while a model is built or loaded.

    When large blocks are freed, glibc raises its mmap threshold and serves the next blocks from the
    heap. Shards, which stay, then lie between gathered buffers, which are freed. So the freed
    memory is never returned to the system. A model of 1B parameters took 1.9 GiB too much while it
    was built (benchmarks/LOG.md). This acts on glibc only."""

    def __init__(self, every: int = 1 << 25):
        self.every = every
        self.freed = 0
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._trim = getattr(library, "malloc_trim", None)

    def freed_elements(self, numel: int) -> None:
        """Count `numel` elements freed; trim after each `every` of them."""
        self.freed += numel
        if self.freed >= self.every and self._trim is not None:
            self.freed = 0
            self._trim(0)
