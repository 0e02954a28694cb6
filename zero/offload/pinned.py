"""Host buffers for direct I/O and for an accelerator: page-aligned, pinned if possible, and reused.

This file knows nothing of files.
"""

from __future__ import annotations

import logging
import mmap
import resource
import threading
import weakref

import torch

from zero import device
from zero.comm.communicator import on_huge_pages

logger = logging.getLogger("zero")

# Disk, page cache and mappings need positions, sizes and addresses that are multiples of this.
PAGE = max(4096, mmap.ALLOCATIONGRANULARITY)


class HostMemory:
    """Buffers in page-aligned host memory. A buffer is used again when no tensor refers to it any
    more.

    With `pin` and an accelerator the memory is pinned, see `new_block`. No allocator waits for
    copies from and to these buffers: synchronize with them before a buffer is dropped."""

    def __init__(self, pin: bool = False):
        self._pin = pin
        self._lock = threading.Lock()
        # The garbage collector may return a buffer at any moment. So this takes no lock: it
        # appends.
        self._free: list[memoryview] = []

    def take(self, nbytes: int, phase: int = 0) -> torch.Tensor:
        """A buffer (nbytes,) of uint8 whose address is `phase` modulo `PAGE`.

        `nbytes` must be above 0. The buffer may hold anything.
        """
        size = round_up(nbytes + phase, PAGE)
        with self._lock:
            sizes = [(len(block), i) for i, block in enumerate(self._free)]
            fitting = [each for each in sizes if size <= each[0] <= 2 * size]
            block = self._free.pop(min(fitting)[1]) if fitting else new_block(size, self._pin)
        view = block[phase : phase + nbytes]
        weakref.finalize(view, self._free.append, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def trim(self) -> None:
        """Give the memory of buffers that no tensor refers to back to the system."""
        with self._lock:
            self._free.clear()

    def like(self, source: torch.Tensor) -> torch.Tensor:
        """A buffer with the dtype, the shape and the phase of `source`: direct I/O between both
        needs no copy.
        """
        buffer = self.take(source.nbytes, source.data_ptr() % PAGE)
        return buffer.view(source.dtype).view(source.shape)


_pins = True


def new_block(size: int, pin: bool) -> memoryview:
    """Page-aligned memory of `size` bytes, a multiple of `PAGE`; `pin`: pinned, where there is an
    accelerator.

    It is registered with CUDA or ROCm; where that fails, one warning, and it is pageable. Elsewhere
    it is torch's."""
    global _pins
    if pin and torch.accelerator.is_available() and not device.can_register():
        pinned = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned.data[-pinned.ctypes.data % PAGE :][:size]
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = memoryview(memory)
    address = on_huge_pages(torch.frombuffer(block, dtype=torch.uint8)).data_ptr()
    if pin and _pins and device.can_register():
        code = device.pin(address, size)
        if code == 0:
            # A forked process, such as a worker of a DataLoader, would share the pages. The next
            # write of this process would then go to a copy, while the accelerator would continue
            # to read the old page.
            memory.madvise(mmap.MADV_DONTFORK)
            index = torch.accelerator.current_device_index()
            weakref.finalize(block, device.unpin, address, memory, index).atexit = False
        else:
            _pins = False
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            logger.warning(
                "cannot pin %d bytes of host memory (CUDA error %d): copies to and from the GPU "
                "will be slower. The limit of locked memory (ulimit -l) is %s",
                size,
                code,
                "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes",
            )
    return block


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
