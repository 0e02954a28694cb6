"""Tensors in files: the slices of a checkpoint, one file per rank.

[Note: slices] A checkpoint does not depend on a run's groups and sub-groups. It identifies a tensor
by its parameter's name, and values by their position in the flattened tensor. Each rank writes the
slices that it holds, and the manifest says which file holds which range. A reader with different
shards asks for different ranges, which are assembled from the files.

[Note: parts] A parameter that is split over a model group (tensor parallelism) is stored in parts:

    weights/NAME@I         part I of NAME, flattened; the manifest says along which dimension NAME
                           was split
    optimizer/KEY/NAME@I   the same for an optimizer state

A run whose model is split in the same way reads its own parts. Any other run reads all parts, one
parameter at a time.

safetensors' own writer is not used, because it needs whole tensors in memory and cannot compute
checksums."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from zero.checkpoint import disk
from zero.checkpoint.blocks import check_files, header, in_threads, read_blocks
from zero.checkpoint.manifest import BLOCK, STORABLE, Manifest, read_manifest
from zero.checkpoint.values import dtype_name, dtype_of
from zero.core.sharded_param import Cut
from zero.errors import UsageError

# Bytes after which the file is synced, so that the last sync has little to do.
_FLUSH = 256 << 20


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its name, shape and dtype."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Slice(NamedTuple):
    """Elements from `start` on of the flattened tensor `key`, which has `numel`: `values`, 1-D.

    The values of a slice to be written may be `Stored`: they are produced one block at a time.
    """

    key: str
    numel: int
    start: int
    values: Any

    @classmethod
    def whole(cls, key: str, tensor: torch.Tensor) -> Slice:
        """Return a slice of a whole tensor. A read fills its memory, so it must be contiguous."""
        return cls(key, tensor.numel(), 0, tensor.detach().view(-1))

    def share(self, rank: int, size: int) -> Slice:
        """Return the equal share that one of `size` ranks with the same values writes."""
        first, end = (self.values.numel() * each // size for each in (rank, rank + 1))
        return self._replace(start=self.start + first, values=self.values[first:end])


def name_in(key: str) -> str:
    """Return the name of the parameter to which a tensor's key in a checkpoint belongs."""
    return key.removeprefix("weights/") if key.startswith("weights/") else key.split("/", 2)[-1]


# -- writing


def bytes_of(values: torch.Tensor) -> memoryview:
    """Return the memory of a tensor on the host."""
    flat: Any = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def write(slices: Sequence[Slice], folder: Path, name: str) -> dict:
    """Write this rank's slices to a new file, durably. Returns its size, checksums and slices for
    the manifest.
    """
    # Larger elements first, so that each is at a multiple of its size, and in a single block.
    stored = [each for each in slices if each.values.numel()]
    stored.sort(key=lambda each: -each.values.itemsize)
    begin = header(
        (f"{each.key}@{each.start}", dtype_name(each.values.dtype), each.values.shape)
        for each in stored
    )
    contents = [torch.frombuffer(bytearray(begin), dtype=torch.uint8)]
    contents += [each.values for each in stored]
    *starts, size = accumulate((content.nbytes for content in contents), initial=0)
    sums = [""] * -(-size // BLOCK)
    with disk.create(folder / name) as descriptor:

        def write_block(number: int) -> None:
            position, hashed = number * BLOCK, xxhash.xxh3_64()
            end = min(position + BLOCK, size)
            index = bisect_right(starts, position) - 1
            while position < end:
                content, first = contents[index], position - starts[index]
                last = min(content.nbytes, end - starts[index])
                values = content[first // content.itemsize : last // content.itemsize]
                if not isinstance(values, torch.Tensor):
                    values = values.values()
                piece = bytes_of(values.cpu())
                hashed.update(piece)
                disk.write(descriptor, piece, position)
                position, index = position + len(piece), index + 1
            sums[number] = hashed.hexdigest()
            if end % _FLUSH == 0:
                os.fdatasync(descriptor)

        in_threads(write_block, range(len(sums)))
    tensors: dict[str, dict] = {}
    for each, position in zip(stored, starts[1:], strict=True):
        entry = {"dtype": dtype_name(each.values.dtype), "numel": each.numel, "slices": []}
        place = [each.start, each.values.numel(), name, position]
        tensors.setdefault(each.key, entry)["slices"].append(place)
    return {"name": name, "file": {"bytes": size, "sums": sums}, "tensors": tensors}


# -- reading


class _Target(NamedTuple):
    """Memory for the elements at byte `position` of a file, where they have `dtype`."""

    position: int
    dtype: torch.dtype
    values: Any

    @property
    def end(self) -> int:
        return self.position + self.values.numel() * self.dtype.itemsize

    def take(self, block: torch.Tensor, begin: int) -> None:
        """Copy the values that are in `block`, the bytes of the file from `begin` on."""
        size, first = self.dtype.itemsize, max(begin, self.position)
        last = min(begin + block.numel(), self.end)
        values = block[first - begin : last - begin].view(self.dtype)
        self.values[(first - self.position) // size : (last - self.position) // size].copy_(values)


class CheckpointReader:
    """Reads slices of a checkpoint and verifies them, in one process, without a process group.
    `cuts`: how parameters are split over this run's ranks, by name.
    """

    def __init__(self, folder: Path, manifest: Manifest, cuts: Mapping[str, Cut] | None = None):
        self.folder = folder
        self.manifest = manifest
        self._cuts = cuts or {}

    def stored_cut(self, key: str) -> list[int] | None:
        """How the tensor of this key was split when it was saved: (dimension, blocks, parts)."""
        entry = self.manifest.parameters.get(name_in(key))
        return None if entry is None else entry.cut

    def _stored_keys(self, key: str) -> list[str]:
        cut = self.stored_cut(key)
        return [key] if cut is None else [f"{key}@{index}" for index in range(cut[-1])]

    def holds(self, key: str) -> bool:
        """Whether there is a tensor with this key, whole or in parts."""
        return self._stored_keys(key)[0] in self.manifest.tensors

    def dtype(self, key: str) -> torch.dtype:
        """Raise ValueError for a key that the checkpoint does not have."""
        if not self.holds(key):
            raise ValueError(f"the checkpoint has no {key}")
        return dtype_of(self.manifest.tensors[self._stored_keys(key)[0]].dtype)

    def check(self, key: str, numel: int) -> None:
        """Raise ValueError for a key that is missing, or whose size differs."""
        tensors = self.manifest.tensors
        stored = sum(tensors[each].numel for each in self._stored_keys(key) if each in tensors)
        if stored != numel:
            raise ValueError(f"{key} has {stored} elements in the checkpoint, {numel} here")

    def read(self, slices: Iterable[Slice]) -> None:
        """Fill the slices' memory from the files.

        Raises:
            ValueError: for a key that is missing, or whose size differs.
            DamagedCheckpointError: if the files do not contain what was written. Some of the memory
                may already be filled.
        """
        targets: dict[str, list[_Target]] = defaultdict(list)
        otherwise_cut: dict[str, list[Slice]] = defaultdict(list)
        for each in slices:
            stored, cut = self.stored_cut(each.key), self._cuts.get(name_in(each.key))
            if stored != (cut and cut.described):
                otherwise_cut[each.key].append(each)
            elif each.numel:
                key = each.key if cut is None else f"{each.key}@{cut.index}"
                for name, target in self._targets(each._replace(key=key)):
                    targets[name].append(target)
        for name, of_file in targets.items():
            self._read_file(name, of_file)
        for key, of_tensor in otherwise_cut.items():
            values, cut = self._joined(key), self._cuts.get(name_in(key))
            values = (values if cut is None else cut.of(values)).reshape(-1)
            for each in of_tensor:
                each.values.copy_(values[each.start : each.start + each.values.numel()])

    def _joined(self, key: str) -> torch.Tensor:
        """Return the whole tensor of a parameter, in host memory."""
        shape, cut = torch.Size(self.manifest.parameters[name_in(key)].shape), self.stored_cut(key)
        self.check(key, shape.numel())
        parts = []
        for stored in self._stored_keys(key):
            numel = self.manifest.tensors[stored].numel
            parts.append(torch.empty(numel, dtype=self.dtype(key), device="cpu"))
            for name, target in self._targets(Slice.whole(stored, parts[-1])):
                self._read_file(name, [target])
        return parts[0].view(shape) if cut is None else join(parts, shape, *cut[:2])

    def _targets(self, wanted: Slice) -> Iterator[tuple[str, _Target]]:
        """Yield where the elements of a slice are: (file, the elements in it)."""
        self.check(wanted.key, wanted.numel)
        stored, start = self.manifest.tensors[wanted.key], wanted.start
        dtype = dtype_of(stored.dtype)
        end = start + wanted.values.numel()
        index = bisect_right([each.start for each in stored.slices], start) - 1
        for each in stored.slices[max(0, index) :]:
            if each.start >= end:
                break
            first, last = max(start, each.start), min(end, each.end)
            if first < last:
                position = each.position + (first - each.start) * dtype.itemsize
                values = wanted.values[first - start : last - start]
                yield each.file, _Target(position, dtype, values)

    def _read_file(self, name: str, targets: list[_Target]) -> None:
        """Read and verify the blocks that contain `targets`."""
        wanted: dict[int, list[_Target]] = defaultdict(list)
        for target in targets:
            for number in range(target.position // BLOCK, -(-target.end // BLOCK)):
                wanted[number].append(target)

        def take(number: int, memory: memoryview) -> None:
            block = torch.frombuffer(memory, dtype=torch.uint8)
            for target in wanted[number]:
                target.take(block, number * BLOCK)

        read_blocks(self.folder / name, self.manifest.files[name], sorted(wanted), take)


def open_checkpoint(
    folder: Path, cuts: Mapping[str, Cut] | None = None, all_files: bool = True
) -> CheckpointReader:
    """Return a reader of the checkpoint in its own folder.

    Raises:
        DamagedCheckpointError: the manifest is missing or damaged; with `all_files` also if a file
            is missing or has the wrong size.
        ValueError: another version wrote it.
    """
    manifest = read_manifest(folder)
    if all_files:
        check_files(folder, manifest)
    return CheckpointReader(folder, manifest, cuts)


def join(parts: Sequence[torch.Tensor], shape: torch.Size, dim: int, blocks: int) -> torch.Tensor:
    """Join the parts (1-D) of a tensor of this shape.

    It has `blocks` along `dim`, and each part has a piece of every block.
    """
    before, after = shape[:dim], shape[dim + 1 :]
    pieces = [part.view(*before, blocks, -1, *after) for part in parts]
    return torch.cat(pieces, dim=dim + 1).view(shape)


# -- tensors whose values are read part by part, when they are needed

_DTYPES = {name: getattr(torch, dtype) for dtype, name in STORABLE.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor in files or in codes. `read(start, end)` returns these elements of the flattened
    tensor, 1-D and in `dtype`; those of a file on the host. It may be called from several threads.

    Attributes and methods have the names of a tensor's, so that `zero.checkpoint.files.write` takes
    it as the values of a slice.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        flat = tensor.detach().cpu().contiguous().view(-1)
        return cls(tuple(tensor.shape), tensor.dtype, lambda start, end: flat[start:end])

    @classmethod
    def at(cls, path: Path, position: int, shape: Sequence[int], dtype: torch.dtype) -> Stored:
        """Return the tensor that begins at this position of a file."""

        def read(start: int, end: int) -> torch.Tensor:
            values = torch.empty(end - start, dtype=dtype, device="cpu")
            with open(disk.open_regular(path.resolve()), "rb", buffering=0) as file:
                place = position + start * dtype.itemsize
                if not disk.read_into(file.fileno(), bytes_of(values), place):
                    raise UsageError(f"{path} became shorter while it was read")
            return values

        return cls(tuple(shape), dtype, read)

    @classmethod
    def joined(cls, pieces: Sequence[Stored], shape: Sequence[int]) -> Stored:
        """Return the tensor whose elements are those of the pieces, which must be of one dtype."""
        starts = list(accumulate((each.numel() for each in pieces), initial=0))
        dtype = pieces[0].dtype

        def read(start: int, end: int) -> torch.Tensor:
            found = []
            for index in range(max(bisect_right(starts, start) - 1, 0), len(pieces)):
                first, most = starts[index], pieces[index].numel()
                if first >= end:
                    break
                found.append(pieces[index].read(max(start - first, 0), min(end - first, most)))
            return torch.cat(found) if found else torch.empty(0, dtype=dtype, device="cpu")

        return cls(tuple(shape), dtype, read)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self.itemsize

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def __getitem__(self, part: slice) -> Stored:
        """Return a range of the flattened tensor."""
        start, end, _ = part.indices(self.numel())
        shape = torch.Size((end - start,))
        return Stored(shape, self.dtype, lambda first, last: self.read(start + first, start + last))

    def values(self) -> torch.Tensor:
        """Return the flattened tensor."""
        return self.read(0, self.numel())

    def tensor(self) -> torch.Tensor:
        return self.values().view(self.shape)


def tensors_of(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file. Raises UsageError, which names the file, if it is
    damaged.

    safetensors' own reader is not used for the values, because the pages that it maps count as this
    process's memory.
    """
    try:
        with safe_open(path, framework="pt"):  # checks the header against the file
            pass
    except SafetensorError as error:
        raise UsageError(f"{path} is damaged ({error}): copy it again") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise UsageError(f"{path}: {name} has the dtype {entry['dtype']}, which torch lacks")
    return {
        name: Stored.at(
            path, 8 + length + entry["data_offsets"][0], entry["shape"], _DTYPES[entry["dtype"]]
        )
        for name, entry in header.items()
    }
