"""Writes files and folders durably, without following symbolic links, and locks folders.

A file is synced before its name appears. Its folder is synced afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from zero.errors import UsageError, size

logger = logging.getLogger("zero")

# Names of unfinished files and folders begin with this. Readers ignore them; the next save removes
# those left over.
UNFINISHED = ".saving-"
LOCK = ".zero-lock"


def unfinished(path: Path) -> Path:
    """Return a new name in the same folder as `path`."""
    return path.with_name(f"{UNFINISHED}{path.name}-{secrets.token_hex(4)}")


@contextmanager
def create(path: Path, mode: int = 0o666) -> Iterator[int]:
    """Context with the descriptor of a new file, which is durable at the end.

    Raises FileExistsError if the name exists, even as a link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write `path` completely or not at all. A link of that name is replaced, not followed."""
    temporary = unfinished(path)
    try:
        with create(temporary, mode) as descriptor:
            write(descriptor, memoryview(text.encode()), 0)
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    sync(path.parent)


def write(descriptor: int, data: memoryview, position: int) -> int:
    """Write all of `data` at `position`, and return where it ends."""
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count
    return position


def open_regular(path: Path) -> int:
    """Context with a descriptor of a regular file.

    Raises OSError for anything else of that name, including links and pipes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read(path: Path) -> bytes:
    """Return the content of a regular file."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def read_into(descriptor: int, memory: memoryview, position: int) -> bool:
    """Fill the memory with what is at `position`, and return whether the file has that much."""
    while memory:
        if not (count := os.preadv(descriptor, [memory], position)):
            return False
        memory, position = memory[count:], position + count
    return True


def sync(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_room(folder: Path, nbytes: int, what: str, named: Path | None = None) -> None:
    """Raise OSError, with the folder that is `named` in it, unless there is room for `what`."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        sizes = f"{what} takes {size(nbytes)} and {size(free)} are free"
        text = f"{sizes}; make room or name another folder"
        raise OSError(errno.ENOSPC, text, str(named or folder))


def make_folders(folder: Path) -> None:
    """Make the folder and its parents, durably."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder))
    if not folder.exists():
        make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content, if it exists."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass


# -- the lock

# Descriptors of locked folders, the most recently used last. A script may save to a new folder each
# time, so the oldest locks are released.
_held: dict[str, int] = {}
MOST_LOCKS = 16


def lock(folder: Path) -> None:
    """Lock a folder until this process ends or has locked `MOST_LOCKS` others. A second call does
    nothing. The kernel drops the lock of a dead process.

    Raises UsageError, with the host, number and start time of the process that holds the lock.
    """
    key = os.path.realpath(folder)
    if key in _held:
        _held[key] = _held.pop(key)
        return
    descriptor = os.open(
        folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 500, 0).decode(errors="replace")
        os.close(descriptor)
        raise UsageError(
            f"{folder} is in use by another job ({owner or 'which has just begun'}): end that one, "
            "or save to another "
            "folder; two jobs in one folder would remove each other's checkpoints"
        ) from None
    except OSError as error:
        logger.warning("%s: two jobs in this folder would not be noticed: %s", folder, error)
    else:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor,
            f"host {socket.gethostname()}, process {os.getpid()}, since {now}".encode(),
            0,
        )
    _held[key] = descriptor
    if len(_held) > MOST_LOCKS:
        os.close(_held.pop(next(iter(_held))))


def _forget_locks() -> None:
    """Run in forked children, such as data-loading workers, which must not keep the lock after the
    job has ended.
    """
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)
