"""The files of a checkpoint as bytes: headers, which are those of safetensors, and blocks with
checksums.

[Note: blocks] A few threads write, checksum (XXH3) and read a file in blocks of `BLOCK` bytes. When
they read a part of a file, they verify the blocks that contain it while these are in the
processor's cache. No block is read twice.

Nothing here needs torch, which takes seconds to import: `zero inspect` does without it.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import xxhash

from zero.checkpoint import disk
from zero.checkpoint.manifest import (
    BLOCK,
    MANIFEST,
    STORABLE,
    DamagedCheckpointError,
    File,
    Manifest,
    damaged,
    itemsize,
)
from zero.threads import EngineThread

THREADS = 4
_scratch = threading.local()


def header(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """Return the header of a safetensors file of these tensors: (name, dtype, shape)."""
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in STORABLE:
            raise ValueError(f"{name}: safetensors has no {dtype}, so it cannot be stored")
        start, end = end, end + math.prod(shape) * itemsize(dtype)
        place = {"dtype": STORABLE[dtype], "shape": [*shape], "data_offsets": [start, end]}
        entries[name] = place
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data
    return len(encoded).to_bytes(8, "little") + encoded


def in_threads(act: Callable[[int], None], numbers: Iterable[int]) -> None:
    """Call `act` for each number, in a few threads.

    After an error, the remaining numbers are skipped and the error is raised.
    """
    left, errors = iter(list(numbers)), []

    def work() -> None:
        for number in left:  # shared: each thread takes the next one
            if errors:
                return
            try:
                act(number)
            except BaseException as error:
                errors.append(error)

    helpers = [EngineThread(work, name="zero slices") for _ in range(THREADS - 1)]
    # The interpreter may be at its end, and starts no threads, when a save in the background is not
    with suppress(RuntimeError):
        for helper in helpers:
            helper.start()
    work()
    for helper in helpers:
        if helper.ident is not None:
            helper.join()
    if errors:
        raise errors[0]


def read_blocks(
    path: Path, entry: File, numbers: Iterable[int], take: Callable[[int, memoryview], Any]
) -> None:
    """Read and verify blocks of a file. `take` gets each one's number and memory, which is used
    again after that.
    """
    descriptor = _open(path, entry)

    def read_block(number: int) -> None:
        begin = number * BLOCK
        memory = _buffer()[: min(BLOCK, entry.bytes - begin)]
        if not disk.read_into(descriptor, memory, begin):
            raise damaged(path, "it became shorter while it was read")
        if xxhash.xxh3_64_hexdigest(memory) != entry.sums[number]:
            raise damaged(path, "its checksum does not match its content")
        take(number, memory)

    try:
        in_threads(read_block, numbers)
    finally:
        os.close(descriptor)


def _buffer() -> memoryview:
    """Return this thread's memory for a block."""
    if not hasattr(_scratch, "block"):
        _scratch.block = memoryview(bytearray(BLOCK))
    return _scratch.block


def verify(
    folder: Path, manifest: Manifest, advance: Callable[[int], Any] = lambda nbytes: None
) -> None:
    """Verify all checksums of all files. DamagedCheckpointError names a damaged file.

    `advance` is called with the number of bytes of each block.
    """
    for name, entry in manifest.files.items():
        blocks = range(len(entry.sums))
        read_blocks(folder / name, entry, blocks, lambda _, memory: advance(len(memory)))


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpointError unless all files have their sizes, which is all that a crash can
    change, and contain the manifest's tensors, which each file's header also names.
    """
    stored: dict[str, list[tuple[int, tuple[str, str, Sequence[int]]]]] = defaultdict(list)
    for key, tensor in manifest.tensors.items():
        for each in tensor.slices:
            entry = f"{key}@{each.start}", tensor.dtype, (each.numel,)
            stored[each.file].append((each.position, entry))
    for name, file in manifest.files.items():
        descriptor = _open(folder / name, file)
        try:
            expected = header(entry for _, entry in sorted(stored[name], key=itemgetter(0)))
            found = os.pread(descriptor, len(expected), 0)
        finally:
            os.close(descriptor)
        if found != expected:
            verify(folder, manifest)  # find out which file is damaged
            raise damaged(folder / MANIFEST, f"{name} has tensors of other sizes or dtypes")


def _open(path: Path, entry: File) -> int:
    """Return a descriptor of a checkpoint's file that has the size that was written."""
    try:
        descriptor = disk.open_regular(path)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise damaged(path, f"it cannot be opened: {error.strerror}") from error
    size = os.fstat(descriptor).st_size
    if size == entry.bytes:
        return descriptor
    os.close(descriptor)
    raise damaged(path, f"{size} bytes, {entry.bytes} were written")
