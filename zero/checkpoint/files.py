"""Tensors in a checkpoint: slices of flattened tensors, in one safetensors file for each rank.

[Note: slices] A checkpoint knows nothing of a run's groups and tiles. It knows a tensor by its
parameter's name, and values by their position in the flattened tensor. Each rank writes the slices
that it holds. The manifest says which file holds which range. A reader with other shards asks for
other ranges, which are assembled from the files.

[Note: blocks] A few threads write, checksum (XXH3) and read a file in blocks of `BLOCK` bytes. To
read a part of a file, they verify the blocks that contain it, while these are in the processor's
cache. No block is read twice."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import xxhash

from zero.checkpoint import disk
from zero.checkpoint.manifest import BLOCK, DamagedCheckpointError, File, Manifest
from zero.checkpoint.model import TensorSpec, header
from zero.checkpoint.values import dtype_name, dtype_of
from zero.optim.adam8bit import CodedSlice

THREADS = 4
# Bytes after which the file is synced, so that the last sync has little to do.
_FLUSH = 256 << 20


@dataclass
class Slices:
    """The parts of one flattened tensor of `numel` elements that this rank holds: {position: 1-D
    values}.

    To be written, a part may be a `CodedSlice`: its values are made a block at a time.
    """

    numel: int
    parts: dict[int, torch.Tensor | CodedSlice] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def share(self, place: int, size: int) -> Slices:
        """An equal share of each part, for one of `size` ranks to write, which all hold the same
        parts.
        """
        shares = Slices(self.numel)
        for start, part in self.parts.items():
            first, end = (part.numel() * each // size for each in (place, place + 1))
            shares.parts[start + first] = part[first:end]
        return shares


def whole(tensor: torch.Tensor) -> Slices:
    """A tensor that this rank holds completely.

    A read fills its memory, so it must be contiguous.
    """
    return Slices(tensor.numel(), {0: tensor.detach().view(-1)})


def add(
    slices: dict[str, Slices], key: str, numel: int, start: int, values: torch.Tensor | CodedSlice
) -> None:
    """Note that `values` are the elements from `start` on of the tensor `key`."""
    slices.setdefault(key, Slices(numel)).parts[start] = values


def _in_threads(act: Callable[[int], None], numbers: Iterable[int]) -> None:
    """Call `act` for each number, in a few threads.

    After an error the rest is skipped, and the error is raised.
    """
    left, errors = iter(list(numbers)), []

    def work() -> None:
        for number in left:  # shared: each thread takes the next one
            try:
                if errors:
                    return
                act(number)
            except BaseException as error:
                errors.append(error)

    helpers = []
    with suppress(
        RuntimeError
    ):  # the interpreter may be at its end when a save in the background is not
        for _ in range(THREADS - 1):
            helper = threading.Thread(target=work, daemon=True)
            helper.start()
            helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


# -- writing


def write(slices: dict[str, Slices], folder: Path, name: str) -> dict:
    """Write this rank's slices to a new file, durable at the end: its size, sums and slices for the
    manifest.
    """
    # Larger elements first: so each element is at a multiple of its size, and in one block only.
    parts = [
        (key, start, part)
        for key, entry in slices.items()
        for start, part in entry.parts.items()
        if part.numel()
    ]
    parts.sort(key=lambda each: -each[2].itemsize)
    begin = header(
        TensorSpec(f"{key}@{start}", part.shape, part.dtype) for key, start, part in parts
    )
    contents = [
        torch.frombuffer(bytearray(begin), dtype=torch.uint8),
        *(part for _, _, part in parts),
    ]
    *starts, size = accumulate((content.nbytes for content in contents), initial=0)
    sums = [""] * -(-size // BLOCK)
    with disk.create(folder / name) as descriptor:

        def write_block(number: int) -> None:
            position, hashed = number * BLOCK, xxhash.xxh3_64()
            end = min(position + BLOCK, size)
            index = bisect_right(starts, position) - 1
            while position < end:
                content, first = contents[index], position - starts[index]
                piece = _bytes_of(content, first, min(content.nbytes, end - starts[index]))
                hashed.update(piece)
                disk.write(descriptor, piece, position)
                position, index = position + len(piece), index + 1
            sums[number] = hashed.hexdigest()
            if end % _FLUSH == 0:
                os.fdatasync(descriptor)

        _in_threads(write_block, range(len(sums)))
    stored: dict[str, dict] = {}
    for (key, start, part), position in zip(parts, starts[1:], strict=True):
        entry = stored.setdefault(
            key, {"dtype": dtype_name(part.dtype), "numel": slices[key].numel, "slices": []}
        )
        entry["slices"].append([start, part.numel(), name, position])
    return {"name": name, "file": {"bytes": size, "sums": sums}, "tensors": stored}


def _bytes_of(content: torch.Tensor | CodedSlice, first: int, end: int) -> memoryview:
    """Bytes `first : end`, both at multiples of the element's size, in host memory."""
    size = content.itemsize
    values = content[first // size : end // size]
    values = values.values() if isinstance(values, CodedSlice) else values
    return memoryview(values.detach().cpu().view(torch.uint8).numpy())


# -- reading


@dataclass(frozen=True)
class _Target:
    """Elements at `position` of a file that go to `values`."""

    position: int
    dtype: torch.dtype
    values: torch.Tensor

    @property
    def end(self) -> int:
        return self.position + self.values.numel() * self.dtype.itemsize

    def take(self, block: torch.Tensor, begin: int) -> None:
        """Copy the values that are in `block`, the bytes of the file from `begin` on."""
        size, end = self.dtype.itemsize, begin + block.numel()
        first, last = max(begin, self.position), min(end, self.end)
        found = block[first - begin : last - begin].view(self.dtype)
        self.values[(first - self.position) // size : (last - self.position) // size].copy_(found)


class SliceReader:
    """Reads slices of a checkpoint, and verifies what it reads, in one process, without a process
    group.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        self.tensors = manifest.tensors
        self._scratch = threading.local()

    def holds(self, key: str) -> bool:
        """Whether there is a tensor of this key."""
        return key in self.tensors

    def dtype(self, key: str) -> torch.dtype:
        return dtype_of(self.tensors[key].dtype)

    def stored_bytes(self) -> dict[str, int]:
        """The bytes of every tensor, by key."""
        return {
            key: stored.numel * self.dtype(key).itemsize for key, stored in self.tensors.items()
        }

    def check(self, key: str, numel: int) -> None:
        """ValueError for a key that the checkpoint lacks or has in another size."""
        stored = self.tensors[key].numel if key in self.tensors else 0
        if stored != numel:
            raise ValueError(f"{key} has {stored} elements in the checkpoint, {numel} here")

    def read(self, slices: Mapping[str, Slices]) -> None:
        """Fill the slices' memory from the files.

        Raises:
            ValueError: for a key that the checkpoint lacks or has in another size.
            DamagedCheckpointError: what lies in the files is not what was written; some of the
            memory is filled then.
        """
        targets: dict[str, list[_Target]] = {}
        for key, entry in slices.items():
            for name, target in self._targets(key, entry) if entry.numel else ():
                targets.setdefault(name, []).append(target)
        for name, of_file in targets.items():
            of_file.sort(key=lambda target: target.position)
            self._read_file(name, of_file)

    def verify(self, advance: Callable[[int], Any] | None = None) -> None:
        """Compare all sums of all files;

        DamagedCheckpointError names one. `advance` gets the bytes of each block.
        """
        for name in self.manifest.files:
            self._read_file(name, None, advance)

    def _targets(self, key: str, wanted: Slices) -> Iterator[tuple[str, _Target]]:
        self.check(key, wanted.numel)
        stored, dtype = self.tensors[key], self.dtype(key)
        starts = [each.start for each in stored.slices]
        for start, part in wanted.parts.items():
            end = start + part.numel()
            for each in stored.slices[max(0, bisect_right(starts, start) - 1) :]:
                if each.start >= end:
                    break
                first, last = max(start, each.start), min(end, each.end)
                if first < last:
                    position = each.position + (first - each.start) * dtype.itemsize
                    yield each.file, _Target(position, dtype, part[first - start : last - start])

    def _read_file(
        self, name: str, targets: list[_Target] | None, advance: Callable[[int], Any] | None = None
    ) -> None:
        """Read and verify the blocks that contain `targets`, sorted by position.

        None: all blocks.
        """
        path, entry = self.folder / name, self.manifest.files[name]
        descriptor = _open(path, entry)
        wanted: dict[int, list[_Target]] = (
            {} if targets is not None else {n: [] for n in range(len(entry.sums))}
        )
        for target in targets or ():
            for number in range(target.position // BLOCK, -(-target.end // BLOCK)):
                wanted.setdefault(number, []).append(target)

        def read_block(number: int) -> None:
            begin = number * BLOCK
            block = self._buffer()[: min(BLOCK, entry.bytes - begin)]
            into = memoryview(block.numpy())
            while into:
                if not (count := os.preadv(descriptor, [into], begin + block.numel() - len(into))):
                    raise DamagedCheckpointError(
                        f"{path} is damaged: it became shorter while it was read"
                    )
                into = into[count:]
            if xxhash.xxh3_64_hexdigest(block.numpy()) != entry.sums[number]:
                raise DamagedCheckpointError(
                    f"{path} is damaged: its checksum is not that of what was written"
                )
            for target in wanted[number]:
                target.take(block, begin)
            if advance is not None:
                advance(block.numel())

        try:
            _in_threads(read_block, wanted)
        finally:
            os.close(descriptor)

    def _buffer(self) -> torch.Tensor:
        """This thread's memory for a block."""
        if not hasattr(self._scratch, "block"):
            self._scratch.block = torch.empty(BLOCK, dtype=torch.uint8, device="cpu")
        return self._scratch.block


def _open(path: Path, entry: File) -> int:
    """A descriptor of a file of a checkpoint that has the size that was written."""
    try:
        descriptor = disk.open_regular(path)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedCheckpointError(
            f"{path} is damaged: it cannot be opened: {error.strerror}"
        ) from error
    if (found := os.fstat(descriptor).st_size) == entry.bytes:
        return descriptor
    os.close(descriptor)
    raise DamagedCheckpointError(f"{path} is damaged: {found} bytes, {entry.bytes} were written")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpointError unless all files have their sizes: a crash can change nothing
    else.
    """
    for name, entry in manifest.files.items():
        os.close(_open(folder / name, entry))
