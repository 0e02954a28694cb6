"""Files read and written past the page cache, where the file system allows that: a fraction of the time."""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import zlib
from pathlib import Path

# What is asked of the disk at a time, and what it wants positions and sizes to be multiples of.
BLOCK, _ALIGNMENT = 4 << 20, 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


def _aligned_memory() -> memoryview:
    return memoryview(mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _through_the_cache(file: int, error: OSError) -> None:
    """After an error: what is not aligned enough for this disk goes through the cache from now on. Else raise it."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & _DIRECT:
        raise error
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)


class FileReader:
    """Reads ranges of a file; use it with `with`. Raises EOFError where the file ends within a range."""

    def __init__(self, path: Path):
        self._path, self._file, self._buffer = path, _open(path, os.O_RDONLY), _aligned_memory()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def block(self, position: int) -> memoryview:
        """Up to `BLOCK` bytes from a multiple of the alignment on, valid until the next call; empty at the end."""
        while True:
            try:
                return self._buffer[: os.preadv(self._file, [self._buffer], position)]
            except OSError as error:
                _through_the_cache(self._file, error)

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `position` on."""
        done = 0
        while done < len(target):
            inside = (position + done) % _ALIGNMENT
            found = self.block(position + done - inside)[inside : inside + len(target) - done]
            if not found:
                raise EOFError(f"{self._path} ends before byte {position + len(target)}")
            target[done : done + len(found)] = found
            done += len(found)

    def read(self, position: int, count: int) -> bytes:
        found = bytearray(count)
        self.read_into(position, memoryview(found))
        return bytes(found)


class ChecksummedFile(io.RawIOBase):
    """A file that computes the CRC-32 of what is written, from its beginning to its end; `close` makes it durable."""

    def __init__(self, path: Path):
        super().__init__()
        self.crc, self.bytes = 0, 0
        self._buffer, self._filled = _aligned_memory(), 0
        self._file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.bytes

    def write(self, data: bytes | memoryview) -> int:
        data = memoryview(data).cast("B")
        self.crc = zlib.crc32(data, self.crc)
        position = 0
        while position < len(data):
            count = min(len(data) - position, BLOCK - self._filled)
            self._buffer[self._filled : self._filled + count] = data[position : position + count]
            self._filled, position = self._filled + count, position + count
            if self._filled == BLOCK:
                self._hand_over()
        self.bytes += len(data)
        return len(data)

    def _hand_over(self) -> None:
        position, end = 0, -(-self._filled // _ALIGNMENT) * _ALIGNMENT
        while position < end:
            try:
                position += os.write(self._file, self._buffer[position:end])
            except OSError as error:
                _through_the_cache(self._file, error)
        self._filled = 0

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            self._hand_over()
            os.ftruncate(self._file, self.bytes)
            os.fsync(self._file)
        finally:
            os.close(self._file)


def checksum(path: Path) -> str:
    """The CRC-32 of a file's content, in hexadecimal digits."""
    crc = position = 0
    with FileReader(path) as file:
        while block := file.block(position):
            crc = zlib.crc32(block, crc)
            position += len(block)
            if position % _ALIGNMENT:
                break  # only the end of a file is not aligned
    return f"{crc:08x}"
