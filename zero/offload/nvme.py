"""Tensors in a file that has no name, on Linux.

ScratchFile.empty  a tensor mapped onto a region of the file: any code may use it, through the page
                   cache
read, write        move its bytes in threads past the page cache (`O_DIRECT`), which the hot path
                   does

Linux keeps both ways coherent. A direct transfer first writes back the dirty part of its range in
the page cache, and a direct write then drops the range from it. Slices of a tensor may be
transferred at the same time, even if they share pages. But do not change a slice through its
mapping while a neighbour in the same tensor is written."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import logging
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from zero.comm.traffic import READ, WRITTEN, transfer
from zero.config import AioConfig
from zero.errors import UsageError
from zero.offload.pinned import PAGE, HostMemory, round_up
from zero.threads import EngineThread

logger = logging.getLogger("zero")

_NVME_PATH = "nvme_path"
# The page cache drops and writes back whole folios of up to 2 MiB. So no two tensors share one.
_FOLIO = 2 << 20
# The file grows by at least this. Growing takes no space on disk.
_SEGMENT = 1 << 30
# Of linux/falloc.h; `os` has no function that makes holes.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def request_bytes(aio: AioConfig) -> int:
    """Bytes of one request, a multiple of `PAGE`: a thread's share of the `queue_depth` blocks.

    The kernel sends all blocks of a request to the disk at once.
    """
    return round_up(aio.block_size * max(1, aio.queue_depth // aio.thread_count), PAGE)


class Transfer:
    """Some requests in flight."""

    def __init__(self, ends: list[Future[None]]):
        self._ends = ends

    def wait(self) -> None:
        """Block until all requests have ended; raises the OSError of the first that failed.

        Any thread may wait.
        """
        concurrent.futures.wait(self._ends)
        for end in self._ends:
            end.result()


Request = tuple[Future[None], Callable[[], None]]
Requests = SimpleQueue[Request | None]


class ScratchFile:
    """One rank's file in `folder`, which is made if it is missing. The file has no name and ends
    with the process.

    Raises UsageError if the folder cannot be made or written to. All methods may be called by any
    thread of the process that made the object, and by exit handlers that are registered after
    `zero` is imported."""

    def __init__(self, folder: str | os.PathLike[str], settings: AioConfig | None = None):
        self.folder = Path(folder)
        self.settings = settings or AioConfig()
        self._file, self._direct = _open(self.folder)
        self._regions = _Regions(self._file)
        self._bounces = HostMemory()
        self._process = os.getpid()
        self._requests: Requests = SimpleQueue()
        threads: list[EngineThread] = []
        # Threads that wait for values to write.
        self._copies: weakref.WeakSet[EngineThread] = weakref.WeakSet()
        self._close = weakref.finalize(
            self, _close, self._requests, self._copies, threads, {self._file, self._direct}
        )
        self._close.atexit = False
        for _ in range(self.settings.thread_count):
            # Not an executor, which would refuse work from exit handlers.
            thread = EngineThread(_work, self._requests, name="zero files", end=self._close)
            threads.append(thread)
            thread.start()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor (numel,) on the CPU. Its place on disk is reserved now, and freed with the
        tensor's storage.

        It holds zeros, or what an earlier tensor held in the same place. Raises OSError where there
        is no space."""
        return self._allocate(numel, dtype)[0]

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`empty`, filled with zeros. That costs nothing in a place that was never used."""
        tensor, fresh = self._allocate(numel, dtype)
        return tensor if fresh else tensor.zero_()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor, which is not empty, is one of this file's or a part of one."""
        return self._regions.position(tensor.data_ptr()) is not None

    def read(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Start to copy `source`, one of this file's tensors or a part of one, to `target` on the
        CPU.

        Both are contiguous and have the same number of bytes, of any dtype. Raises ValueError
        otherwise."""
        return self._start(source, target, is_read=True)

    def write(
        self, target: torch.Tensor, source: torch.Tensor, after: Callable[[], None] | None = None
    ) -> Transfer:
        """Start to copy `source` on the CPU to `target`, as in `read`. Do not change `source`
        before the end.

        `after` is called first, in a thread: it blocks until `source` has its values. Its error is
        the transfer's."""
        return self._start(target, source, is_read=False, after=after)

    def measure(self, nbytes: int, seconds: float) -> tuple[float, float]:
        """Bytes a second that the file moves while it is read and written at the same time, as in a
        step, and that a copy in memory moves.

        At most seven times `nbytes` are moved, and nothing is begun after `seconds`.
        """
        places = [self.empty(nbytes, torch.uint8) for _ in range(2)]
        hosts = [HostMemory().like(place).zero_() for place in places]
        moved, begin = 0, time.perf_counter()
        while not moved or (moved < 7 * nbytes and time.perf_counter() - begin < seconds):
            transfers = [self.write(places[0], hosts[0])]
            transfers += [self.read(places[1], hosts[1])] if moved else []  # what was written
            for each in transfers:
                each.wait()
            moved += len(transfers) * nbytes
            places.reverse()
        end = time.perf_counter()
        hosts[0].copy_(hosts[1])
        return moved / (end - begin), 2 * nbytes / (time.perf_counter() - end)

    def trim(self) -> None:
        """Free the space on disk that tensors have left, and the memory of buffers, which would
        otherwise serve the next ones. The disk may not be able to.
        """
        self._bounces.trim()
        self._regions.punch_holes()

    def close(self) -> None:
        """Wait for all transfers and end the threads. Tensors and their space on disk stay."""
        self._close()

    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        if numel == 0:
            return torch.empty(0, dtype=dtype), True
        nbytes = numel * dtype.itemsize
        try:
            memory, fresh = self._regions.take(nbytes)
        except OSError as error:
            remedy = f"make room there, or name a folder on a larger disk ({_NVME_PATH})"
            raise OSError(
                error.errno, f"no {nbytes} bytes in {self.folder}: {error.strerror}; {remedy}"
            ) from error
        return torch.frombuffer(memory, dtype=dtype, count=numel), fresh

    def _start(
        self,
        mapped: torch.Tensor,
        host: torch.Tensor,
        is_read: bool,
        after: Callable[[], None] | None = None,
    ) -> Transfer:
        if os.getpid() != self._process or not self._close.alive:
            raise ValueError(
                f"the file in {self.folder} is closed, or belongs to the process that this one "
                "comes from"
            )
        if not (mapped.is_contiguous() and host.is_contiguous() and host.device.type == "cpu"):
            raise ValueError("only contiguous tensors on the CPU can be read and written")
        if mapped.nbytes != host.nbytes:
            raise ValueError(f"{mapped.nbytes} bytes in the file, {host.nbytes} in memory")
        position = self._regions.position(mapped.data_ptr()) if mapped.nbytes else 0
        if position is None:
            raise ValueError("not a tensor of this file")
        requests = []
        for start, nbytes, direct in _pieces(position, mapped.nbytes, request_bytes(self.settings)):
            place = (position + start, host.data_ptr() + start, nbytes)
            act = partial(self._carry_out, *place, direct, is_read, (mapped, host))
            requests.append((Future(), act))
        if after is None:
            self._put(requests)
        else:
            # Not in the threads that read and write: reads must not wait for a device.
            copy = EngineThread(self._put, requests, after, name="zero copies")
            copy.start()
            self._copies.add(copy)
        return Transfer([end for end, _ in requests])

    def _put(self, requests: list[Request], after: Callable[[], None] | None = None) -> None:
        """Have the requests carried out, `after` some values have arrived."""
        try:
            if after is not None:
                after()
        except Exception as error:
            for end, _ in requests:
                end.set_exception(error)  # raised by `Transfer.wait`
        else:
            for request in requests:
                self._requests.put(request)

    def _carry_out(
        self,
        position: int,
        address: int,
        nbytes: int,
        direct: bool,
        is_read: bool,
        kept: tuple[torch.Tensor, ...],
    ) -> None:
        """In a thread: move `nbytes` between a position in the file and memory; `direct`: whole
        pages of the file.

        `kept`: the tensors, which must not be freed before the end.
        """
        try:
            with transfer(READ if is_read else WRITTEN, nbytes):
                if direct and self._direct != self._file and (address - position) % PAGE:
                    # Through an aligned buffer, because the memory does not have the file's
                    # alignment.
                    buffer = self._bounces.take(request_bytes(self.settings))
                    if not is_read:
                        ctypes.memmove(buffer.data_ptr(), address, nbytes)
                    self._move(self._direct, position, buffer.data_ptr(), nbytes, is_read)
                    if is_read:
                        ctypes.memmove(address, buffer.data_ptr(), nbytes)
                else:
                    # Pages that other slices may share are written by system calls, not through the
                    # mapping. The kernel lets these and direct writes exclude each other. So a
                    # folio is not made dirty while one of its pages is written past the page cache.
                    file = self._direct if direct else self._file
                    self._move(file, position, address, nbytes, is_read)
        except OSError as error:
            action = "reading from" if is_read else "writing to"
            text = f"{action} {self.folder}, {nbytes} bytes: {error.strerror}; is that disk in "
            text += f"order, and not full? It is the one of {_NVME_PATH}"
            raise OSError(error.errno, text) from error

    def _move(self, file: int, position: int, address: int, nbytes: int, is_read: bool) -> None:
        memory = memoryview((ctypes.c_char * nbytes).from_address(address))
        call, done = (os.preadv if is_read else os.pwritev), 0
        while done < nbytes:
            try:
                count = call(file, [memory[done:]], position + done)
            except OSError as error:
                if error.errno != errno.EINVAL or file == self._file:
                    raise
                _log_buffered(self.folder)
                self._direct = file = self._file
                continue
            if count == 0:
                raise OSError(errno.EIO, f"the file ends {nbytes - done} bytes before that")
            done += count


def _open(folder: Path) -> tuple[int, int]:
    """Two descriptors of a new file without a name: through the page cache, and past it; the same
    one if refused.
    """
    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            logger.warning(
                "%s: %s did not exist and was made, on a disk with %.0f GB free",
                _NVME_PATH,
                folder,
                free / 1e9,
            )
        file, path = tempfile.mkstemp(prefix="zero-", dir=folder)
    except OSError as error:
        remedy = "name a folder on a local disk that this user can write to"
        raise UsageError(
            f"{_NVME_PATH}: no file can be made in {folder}: {error.strerror}; {remedy}"
        ) from error
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


def _fallocate(file: int, mode: int, start: int, nbytes: int) -> None:
    call = ctypes.CDLL(None).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    call(file, mode, start, nbytes)


def _log_buffered(folder: Path) -> None:
    logger.warning(
        "%s does not allow direct I/O: transfers there go through the page cache, more slowly",
        folder,
    )


def _work(requests: Requests) -> None:
    """Run by a thread: carry out requests until None comes.

    Between requests it keeps no file alive.
    """
    while (request := requests.get()) is not None:
        end, carry_out = request
        failure = None
        try:
            carry_out()
        except Exception as error:
            failure = error  # raised by `Transfer.wait`; the thread goes on
        del request, carry_out  # frees the tensors before the waiting thread needs their memory
        if failure is None:
            end.set_result(None)
        else:
            end.set_exception(failure)
        del end, failure


def _close(
    requests: Requests,
    copies: weakref.WeakSet[EngineThread],
    threads: list[EngineThread],
    files: set[int],
) -> None:
    for copy in list(copies):  # a request behind the None below would never be carried out
        if copy is not threading.current_thread():  # which may hold the last reference to the file
            copy.join()
    for _ in threads:
        requests.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # likewise
            thread.join()
    for file in files:
        os.close(file)


def _pieces(position: int, nbytes: int, step: int) -> Iterator[tuple[int, int, bool]]:
    """(start, bytes, direct) of each request: the whole pages in steps, and the partial pages at
    both edges.
    """
    head = min(-position % PAGE, nbytes)
    tail = head + (nbytes - head) // PAGE * PAGE
    if head:
        yield 0, head, False
    for start in range(head, tail, step):
        yield start, min(step, tail - start), True
    if tail < nbytes:
        yield tail, nbytes - tail, False


class _Regions:
    """Parts of an open file that tensors are mapped onto: reserved on disk, freed with the tensors,
    used again.
    """

    def __init__(self, file: int):
        self._file = file
        self._lock = threading.Lock()
        # Position in the file, address, memory.
        self._segments: list[tuple[int, int, memoryview]] = []
        # For each folio of the file whether it is taken; from number `_top` on none was ever used.
        self._taken = bytearray()
        self._top = 0

    def take(self, nbytes: int) -> tuple[memoryview, bool]:
        """Mapped memory, in use as long as the result lives; and whether it was never used before:
        then it holds zeros.

        `nbytes` > 0. Raises OSError if the disk has no space, or the process no addresses.
        """
        count = -(-nbytes // _FOLIO)
        with self._lock:
            first = self._taken.find(bytes(count))
            if first < 0:
                first = self._grow(count)
            self._taken[first : first + count] = b"\1" * count
            fresh, self._top = first >= self._top, max(self._top, first + count)
        position = first * _FOLIO
        before = (segment for segment in reversed(self._segments) if segment[0] <= position)
        start, _, memory = next(before)
        view = memory[position - start : position - start + nbytes]
        weakref.finalize(view, self._give_back, first, count).atexit = False
        reserved = position, round_up(nbytes, PAGE)
        try:
            os.posix_fallocate(self._file, *reserved)
        except OSError:
            # ext4 would keep what it has reserved: all that was left on the disk.
            _fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, *reserved)
            raise
        return view, fresh

    def position(self, address: int) -> int | None:
        """The position in the file of the byte at an address; None if it is in no region."""
        for start, begin, memory in self._segments:
            if begin <= address < begin + len(memory):
                return start + address - begin
        return None

    def punch_holes(self) -> None:
        """Free the space of all regions that no tensor is mapped onto."""
        with self._lock:
            for hole in re.finditer(b"\0+", self._taken[: self._top]):
                start, end = (_FOLIO * folio for folio in hole.span())
                _fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, start, end - start)

    def _give_back(self, first: int, count: int) -> None:
        """The garbage collector may call this at any moment, so it takes no lock."""
        self._taken[first : first + count] = bytes(count)

    def _grow(self, count: int) -> int:
        """Map more of the file; return the number of its first folio.

        A gap separates it from the last mapping.
        """
        first, size = len(self._taken) + 1, max(count * _FOLIO, _SEGMENT)
        os.ftruncate(self._file, first * _FOLIO + size)
        memory = memoryview(mmap.mmap(self._file, size, offset=first * _FOLIO))
        self._segments.append(
            (first * _FOLIO, torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), memory)
        )
        self._taken += b"\1" + bytes(size // _FOLIO)
        return first
