"""Tensors that live in a file without a name. For Linux.

ScratchFile.empty  a tensor mapped onto a region of the file: any code may use it, through the page cache
read, write        move its bytes in threads past the page cache (`O_DIRECT`), which the hot path does

Linux keeps both ways coherent: a direct transfer first writes back what is dirty of its range in the page cache, and a
direct write then drops the range from it. Slices of a tensor may be transferred at the same time, whatever pages they
share; but do not change a slice through its mapping while a neighbour in the same tensor is written.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from zero.errors import UsageError
from zero.offload.memory import PAGE, round_up
from zero.offload.regions import Regions

logger = logging.getLogger("zero")

_NVME_PATH = "zero_optimization.offload_*.nvme_path"


@dataclass(frozen=True)
class AioSettings:
    """How transfers are made: `thread_count` threads have `queue_depth` blocks of `block_size` bytes under way.

    One request is as many blocks on end as fall to a thread; the kernel hands all of a request to the disk at once.
    """

    block_size: int = 1 << 20
    queue_depth: int = 32
    thread_count: int = 4

    @property
    def request(self) -> int:
        """Bytes of one request, a multiple of `PAGE`."""
        return round_up(self.block_size * max(1, self.queue_depth // self.thread_count), PAGE)


class Transfer:
    """A number of requests under way."""

    def __init__(self, requests: int):
        self._left, self._error = requests, None
        self._lock, self._ended = threading.Lock(), threading.Event()
        if requests == 0:
            self._ended.set()

    def wait(self) -> None:
        """Until all requests have ended; raises the OSError of the first that failed."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def end_one(self, error: Exception | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left == 0:
                self._ended.set()


@dataclass
class _Request:
    """`nbytes` between a position in the file and an address in memory; `direct`: these are whole pages of the file."""

    position: int
    address: int
    nbytes: int
    direct: bool
    is_read: bool
    transfer: Transfer
    file: ScratchFile
    tensors: tuple[torch.Tensor, torch.Tensor]  # kept until the end


class ScratchFile:
    """One rank's file in `folder`, which is made if it is missing; the file goes with the process, however that ends.

    Raises UsageError where the folder cannot be made or written to. All methods may be called by any thread of the
    process that made the object, and by atexit handlers too; transfers still under way at exit are abandoned.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: AioSettings | None = None):
        self.folder, self.settings = Path(folder), settings or AioSettings()
        self._file, self._direct = _open(self.folder)
        self._regions, self._process = Regions(self._file), os.getpid()
        self._bounce = threading.local()
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        threads = [
            # Daemons: at exit nobody has to wait for a file that goes anyhow, and an executor would refuse work then.
            threading.Thread(target=_work, args=(self._requests,), name="zero files", daemon=True)
            for _ in range(self.settings.thread_count)
        ]
        for thread in threads:
            thread.start()
        self._close = weakref.finalize(self, _close, self._requests, threads, {self._file, self._direct})
        self._close.atexit = False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor (numel,) on the CPU; its place on disk is reserved now, and is free again when its storage dies.

        It holds zeros, or what an earlier tensor held in the same place. Raises OSError where there is no space.
        """
        return self._allocate(numel, dtype)[0]

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`empty`, filled with zeros: which costs nothing in a place that was never used."""
        tensor, fresh = self._allocate(numel, dtype)
        return tensor if fresh else tensor.zero_()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor, which is not empty, is one of this file's or a part of one."""
        return self._regions.hold(tensor.data_ptr())

    def read(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Start to copy `source`, one of this file's tensors or a part of one, to `target` on the CPU.

        Both are contiguous and have the same number of bytes, of any dtype. Raises ValueError otherwise.
        """
        return self._start(source, target, is_read=True)

    def write(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Start to copy `source` on the CPU to `target`, as in `read`. Do not change `source` before the end."""
        return self._start(target, source, is_read=False)

    def close(self) -> None:
        """Wait for all transfers and end the threads. Tensors stay as they are, and their space with them."""
        self._close()

    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        if numel == 0:
            return torch.empty(0, dtype=dtype), True
        nbytes = numel * dtype.itemsize
        try:
            memory, fresh = self._regions.take(nbytes)
        except OSError as error:
            remedy = f"make room there, or name a folder on a larger disk ({_NVME_PATH})"
            raise OSError(error.errno, f"no {nbytes} bytes in {self.folder}: {error.strerror}; {remedy}") from error
        return torch.frombuffer(memory, dtype=dtype, count=numel), fresh

    def _start(self, mapped: torch.Tensor, host: torch.Tensor, is_read: bool) -> Transfer:
        if os.getpid() != self._process or not self._close.alive:
            raise ValueError(f"the file in {self.folder} is closed, or belongs to the process that this one comes from")
        if not (mapped.is_contiguous() and host.is_contiguous() and host.device.type == "cpu"):
            raise ValueError("only contiguous tensors on the CPU can be read and written")
        if mapped.nbytes != host.nbytes:
            raise ValueError(f"{mapped.nbytes} bytes in the file, {host.nbytes} in memory")
        position = self._regions.position(mapped.data_ptr()) if mapped.nbytes else 0
        pieces = list(_pieces(position, mapped.nbytes, self.settings.request))
        transfer, address = Transfer(len(pieces)), host.data_ptr()
        for start, nbytes, direct in pieces:
            place = (position + start, address + start, nbytes)
            self._requests.put(_Request(*place, direct, is_read, transfer, self, (mapped, host)))
        return transfer

    def carry_out(self, request: _Request) -> None:
        """In a thread: one request, from its beginning to its end."""
        failure: Exception | None = None
        try:
            if request.direct and self._direct != self._file and (request.address - request.position) % PAGE:
                self._move_by_bounce(request)
            else:
                # Pages that other slices may share go by system calls, not through the mapping: the kernel lets these
                # and direct writes exclude one another, so that a folio is not made dirty while one of its pages is
                # written past it.
                self._move(self._direct if request.direct else self._file, request, request.address)
        except OSError as error:
            action = "reading from" if request.is_read else "writing to"
            text = f"{action} {self.folder}, {request.nbytes} bytes: {error.strerror}; is that disk in order?"
            failure = OSError(error.errno, f"{text} It is the one of {_NVME_PATH}")
        except Exception as error:
            failure = error  # for the one who waits; the thread goes on
        request.transfer.end_one(failure)

    def _move_by_bounce(self, request: _Request) -> None:
        """By an aligned buffer of this thread, as the request's memory is not aligned as the file is."""
        if not hasattr(self._bounce, "memory"):
            self._bounce.memory = torch.frombuffer(mmap.mmap(-1, self.settings.request), dtype=torch.uint8)
        buffer = self._bounce.memory.data_ptr()
        if not request.is_read:
            ctypes.memmove(buffer, request.address, request.nbytes)
        self._move(self._direct, request, buffer)
        if request.is_read:
            ctypes.memmove(request.address, buffer, request.nbytes)

    def _move(self, file: int, request: _Request, address: int) -> None:
        memory = memoryview((ctypes.c_char * request.nbytes).from_address(address))
        call, done = (os.preadv if request.is_read else os.pwritev), 0
        while done < request.nbytes:
            try:
                count = call(file, [memory[done:]], request.position + done)
            except OSError as error:
                if error.errno != errno.EINVAL or file == self._file:
                    raise
                _log_buffered(self.folder)
                self._direct = file = self._file
                continue
            if count == 0:
                raise OSError(errno.EIO, f"the file ends {request.nbytes - done} bytes before that")
            done += count


def _open(folder: Path) -> tuple[int, int]:
    """Descriptors of a new file without a name: through the page cache, and past it; one if the latter is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, path = tempfile.mkstemp(prefix="zero-", dir=folder)
    except OSError as error:
        remedy = "name a folder on a local disk that this user can write to"
        raise UsageError(f"{_NVME_PATH}: no file can be made in {folder}: {error.strerror}; {remedy}") from error
    try:
        return file, os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            os.close(file)
            raise
        _log_buffered(folder)
        return file, file
    finally:
        os.unlink(path)


def _log_buffered(folder: Path) -> None:
    logger.warning("%s does not allow direct I/O: transfers there go through the page cache, more slowly", folder)


def _work(requests: SimpleQueue[_Request | None]) -> None:
    """A thread: requests until None comes. It keeps no file alive while it waits for one."""
    while (request := requests.get()) is not None:
        request.file.carry_out(request)
        del request


def _close(requests: SimpleQueue[_Request | None], threads: list[threading.Thread], files: set[int]) -> None:
    for _ in threads:
        requests.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # which may hold the last reference to the file
            thread.join()
    for file in files:
        os.close(file)


def _pieces(position: int, nbytes: int, step: int) -> Iterator[tuple[int, int, bool]]:
    """(start, bytes, direct) of each request: the whole pages in steps, and what is left of the pages at both edges."""
    head = min(-position % PAGE, nbytes)
    tail = head + (nbytes - head) // PAGE * PAGE
    if head:
        yield 0, head, False
    for start in range(head, tail, step):
        yield start, min(step, tail - start), True
    if tail < nbytes:
        yield tail, nbytes - tail, False
