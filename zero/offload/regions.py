"""Regions of a scratch file, for tensors to be mapped onto: reserved on disk, given back when these die, used again."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque

import torch

from zero.offload.memory import PAGE, round_up

# The page cache drops and writes back whole folios, which have up to 2 MiB: no two regions share one.
_REGION = 2 << 20
# What the file grows by at least; that takes no space on disk.
_SEGMENT = 1 << 30


class Regions:
    """Parts of an open file. All methods may be called by any thread."""

    def __init__(self, file: int):
        self._file, self._lock = file, threading.Lock()
        self._segments: list[tuple[int, int, memoryview]] = []  # position in the file, address, memory
        # From `_top` to `_end` nothing was ever used. `_free`, sorted by position, and `_returned`, which is to be
        # merged into it: the garbage collector may give back in the middle of anything, so that takes no lock.
        self._top = self._end = 0
        self._free: list[tuple[int, int]] = []
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> tuple[memoryview, bool]:
        """Mapped memory, the caller's until it dies, and whether it was never used: then it holds zeros.

        `nbytes` > 0. Raises OSError where the disk has no space for them, or the process no addresses.
        """
        size = round_up(nbytes, _REGION)
        with self._lock:
            start, fresh = self._find(size)
            first, _, memory = next(segment for segment in reversed(self._segments) if segment[0] <= start)
        view = memory[start - first : start - first + nbytes]
        weakref.finalize(view, self._returned.append, (start, size)).atexit = False
        os.posix_fallocate(self._file, start, round_up(nbytes, PAGE))
        return view, fresh

    def position(self, address: int) -> int:
        """Where in the file the byte at an address is. Raises ValueError where it is in no region."""
        for start, begin, memory in self._segments:
            if begin <= address < begin + len(memory):
                return start + address - begin
        raise ValueError("not a tensor of this file")

    def hold(self, address: int) -> bool:
        """Whether the byte at an address is in a region."""
        return any(begin <= address < begin + len(memory) for _, begin, memory in self._segments)

    def _find(self, size: int) -> tuple[int, bool]:
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free = _merged(self._free)
        for index, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[index : index + 1] = [(start + size, room - size)] if room > size else []
                return start, False
        if self._end - self._top < size:
            self._grow(max(size, _SEGMENT))
        self._top += size
        return self._top - size, True

    def _grow(self, size: int) -> None:
        start = self._end + (_REGION if self._end else 0)  # a gap: regions of two mappings are never merged
        os.ftruncate(self._file, start + size)
        memory = memoryview(mmap.mmap(self._file, size, offset=start))
        if self._top < self._end:
            self._free.append((self._top, self._end - self._top))
        self._segments.append((start, torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), memory))
        self._top, self._end = start, start + size


def _merged(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted by position, neighbours joined."""
    merged: list[tuple[int, int]] = []
    for start, size in sorted(free):
        if merged and sum(merged[-1]) == start:
            start, size = merged[-1][0], merged.pop()[1] + size
        merged.append((start, size))
    return merged
