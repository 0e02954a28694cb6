"""Host buffers for direct I/O and for a GPU: page-aligned, pinned where that is possible, bounded in bytes."""

from __future__ import annotations

import contextlib
import logging
import mmap
import resource
import threading
import weakref

import torch

logger = logging.getLogger("zero")

# What disk, page cache and mappings want positions, sizes and addresses to be multiples of.
PAGE = max(4096, mmap.ALLOCATIONGRANULARITY)


class HostMemory:
    """Buffers in page-aligned host memory of at most `limit` bytes altogether, which are used again and again.

    With `pin` and a GPU the memory is registered with CUDA; where that fails, one warning, and it is pageable. CUDA's
    own allocator does not know these buffers: synchronize with asynchronous copies before a buffer is released.
    """

    def __init__(self, limit: int, pin: bool = False):
        self._limit, self._pin = limit, pin
        self._free: list[torch.Tensor] = []
        self._out: dict[int, torch.Tensor] = {}  # by address
        self._changed = threading.Condition()

    def take(self, nbytes: int, phase: int = 0) -> torch.Tensor:
        """A buffer (nbytes,) of uint8 whose address is `phase` modulo `PAGE`; what is in it is arbitrary.

        Waits for others to release theirs as long as the limit is exceeded, unless nothing is out.
        """
        size = round_up(max(1, nbytes + phase), PAGE)
        with self._changed:
            while (block := self._find(size)) is None:
                self._changed.wait()
            self._out[block.data_ptr()] = block
        return block[phase : phase + nbytes]

    def like(self, source: torch.Tensor) -> torch.Tensor:
        """A buffer with the dtype, the shape and the phase of `source`: direct I/O between both needs no copy."""
        return self.take(source.nbytes, source.data_ptr() % PAGE).view(source.dtype).view(source.shape)

    def release(self, buffer: torch.Tensor) -> None:
        """Give back what `take` or `like` returned. Raises KeyError where it is not out."""
        with self._changed:
            self._free.append(self._out.pop(buffer.untyped_storage().data_ptr()))
            self._changed.notify_all()

    def _find(self, size: int) -> torch.Tensor | None:
        """A block of at least `size` bytes; None as long as one must be released first."""
        fitting = [block for block in self._free if size <= block.numel() <= 2 * size]
        if fitting:
            found = min(fitting, key=torch.Tensor.numel)
            self._free = [block for block in self._free if block is not found]
            return found
        used = sum(block.numel() for block in self._out.values())
        if self._out and used + size > self._limit:
            return None
        while self._free and used + sum(block.numel() for block in self._free) + size > self._limit:
            self._free.pop(0)
        return new_block(size, self._pin)


_pins = True


def new_block(size: int, pin: bool) -> torch.Tensor:
    """Page-aligned memory of `size` bytes, a multiple of `PAGE`, as uint8; `pin`: registered with CUDA if it can be."""
    global _pins
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)
    block = torch.frombuffer(view, dtype=torch.uint8)
    if pin and _pins and torch.cuda.is_available():
        code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0))
        if code == 0:
            weakref.finalize(view, _unregister, block.data_ptr(), memory).atexit = False
        else:
            _pins = False
            _log_pageable(size, code)
            _clear_cuda_error()
    return block


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _unregister(address: int, memory: mmap.mmap) -> None:
    """`memory` is an argument so that it is unmapped after this."""
    torch.cuda.cudart().cudaHostUnregister(address)


def _log_pageable(size: int, code: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    logger.warning(
        "cannot pin %d bytes of host memory (CUDA error %d): copies to and from the GPU will be slower. "
        "The limit of locked memory (ulimit -l) is %s",
        size,
        code,
        "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes",
    )


def _clear_cuda_error() -> None:
    """A failed call leaves its error behind, which the next launch of a kernel raises as its own: this one does."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
