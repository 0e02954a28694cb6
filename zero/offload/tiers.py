"""Where shards live: the compute device, host memory (pinned if there is an accelerator to copy to), or a file.

This file does not know what the tensors mean.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass

import torch

from zero.config import AioConfig, OffloadConfig
from zero.device import compute_stream, is_accelerator, new_stream
from zero.offload.files import ScratchFile
from zero.offload.memory import PAGE, HostMemory, new_block, round_up
from zero.pending import Pending

# With the file tier, a tensor of fewer bytes stays in host memory: a transfer would not pay. For the moments of tiles
# the bytes of the whole master count.
LEAST_BYTES_IN_A_FILE = 1 << 20

# Pinned buffers between a file and a GPU.
_staging = HostMemory(pin=True)

_files: dict[tuple[str, int, int, int], ScratchFile] = {}


def scratch_file(folder: str, aio: AioConfig) -> ScratchFile:
    """This process's file in `folder`, which all engines share."""
    key = (os.path.abspath(folder), aio.block_size, aio.queue_depth, aio.thread_count)
    if key not in _files:
        _files[key] = ScratchFile(folder, aio)
    return _files[key]


@dataclass(frozen=True)
class Tier:
    """A place for 1-D tensors. On a machine whose compute device is the CPU, the host tier is the device itself.

    A tensor in `file` is mapped memory, which any code may read and write; `load` and `store` are the fast way.
    """

    device: torch.device
    pinned: bool = False
    file: ScratchFile | None = None

    @classmethod
    def of(cls, offload: OffloadConfig | None, aio: AioConfig, compute_device: torch.device) -> Tier:
        """The tier that `offload_param` or `offload_optimizer` asks for. Raises UsageError for an unusable path."""
        if offload is None or offload.device == "none":
            return cls(compute_device)
        pinned = offload.pin_memory and is_accelerator(compute_device)
        file = scratch_file(offload.nvme_path, aio) if offload.device == "nvme" else None
        return cls(torch.device("cpu"), pinned, file)

    def in_memory(self) -> Tier:
        """This tier, or the host's memory in place of a file."""
        return Tier(self.device, self.pinned)

    def holds_in_file(self, tensor: torch.Tensor) -> bool:
        return self.file is not None and self.file.holds(tensor)

    def puts_in_file(self, nbytes: int) -> bool:
        return self.file is not None and nbytes >= LEAST_BYTES_IN_A_FILE

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.puts_in_file(numel * dtype.itemsize):
            return self.file.empty(numel, dtype)
        if self.pinned and numel:
            # Not torch's pinned memory, which rounds sizes up to powers of two.
            block = new_block(round_up(numel * dtype.itemsize, PAGE), pin=True)
            return torch.frombuffer(block, dtype=dtype, count=numel)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.puts_in_file(numel * dtype.itemsize):
            return self.file.zeros(numel, dtype)
        return self.empty(numel, dtype).zero_()

    def keep(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of `values` here."""
        kept = self.empty(values.numel(), dtype or values.dtype)
        self.store(kept, values).wait()
        return kept

    def store(self, target: torch.Tensor, values: torch.Tensor) -> Pending:
        """Start to write `values` to `target`, a tensor of this tier. Do not change `values` before the end."""
        if is_accelerator(values.device) and target.is_pinned():
            return _copy_out(target, values)
        if is_accelerator(target.device) and values.is_pinned():
            target.copy_(values, non_blocking=True)
            return Pending([_Arrival(compute_stream(target.device).record_event())], keep=(values,))
        if not self.holds_in_file(target):
            target.copy_(values)
            return Pending()
        values = values.to("cpu", target.dtype)
        return Pending([self.file.write(target, values)], keep=(values,))

    def load(self, target: torch.Tensor, source: torch.Tensor) -> Pending:
        """Start to read `source`, a tensor of this tier, into `target`, which is on the host or the compute device."""
        if not self.holds_in_file(source):
            target.copy_(source, non_blocking=True)
            return Pending()
        if target.device.type == "cpu":
            return Pending([self.file.read(source, target)])
        staged = _staging.like(source)
        # This copy must block, because the buffer is used again.
        return Pending([self.file.read(source, staged)], lambda: target.copy_(staged))


_copy_stream = functools.cache(new_stream)


class _Arrival:
    """The end of a copy on a device's stream. Any number of threads may wait for it."""

    def __init__(self, event: torch.Event):
        self.wait = event.synchronize


def _copy_out(target: torch.Tensor, values: torch.Tensor) -> Pending:
    """Start to copy from the device to pinned host memory beside the device's computation."""
    stream = _copy_stream(values.device)
    stream.wait_stream(compute_stream(values.device))
    with stream:
        target.copy_(values, non_blocking=True)
    values.record_stream(stream)
    return Pending([_Arrival(stream.record_event())], keep=(values,))


class HostTrimmer:
    """Gives freed host memory back to the system while a model is built or loaded.

    When large blocks are freed, glibc raises its mmap threshold and serves the next blocks from the heap. Shards, which
    stay, then lie between gathered buffers, which are freed. So the freed memory is never returned to the system. A
    model of 1B parameters took 1.9 GiB too much while it was built (benchmarks/LOG.md). This acts on glibc only.
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
