"""Tensors as slices of their flattened selves, and how torch.distributed.checkpoint (DCP) writes and reads them.

[Note: slices]
Whatever the units and tiles of a run look like, a checkpoint knows a tensor only by its parameter's name, and its
values by their position in the flattened tensor. Each rank writes the slices that it holds; DCP's metadata says which
file holds which range. A reader with other shards asks for other ranges, and gets them put together from the files.

That metadata is a pickle: read only checkpoints that you trust.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    SavePlan,
    WriteItem,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

# Elements in one record of a file: what a writer copies, or a reader reads, at a time.
MAX_SLICE = 1 << 24


@dataclass
class Slices:
    """The parts of one flattened tensor of `numel` elements that this rank holds: {position: 1-D values}."""

    numel: int
    parts: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def split(self, max_numel: int = MAX_SLICE) -> None:
        """Cut the parts into parts of at most `max_numel` elements."""
        self.parts = {
            start + i: part[i : i + max_numel]
            for start, part in self.parts.items()
            for i in range(0, part.numel(), max_numel)
        }

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size([start]), torch.Size([part.numel()])) for start, part in self.parts.items()
        ]

    def part(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[index.offset[0]]


def whole(tensor: torch.Tensor) -> Slices:
    """A tensor that this rank holds completely; what is read goes to its memory, so it must be contiguous."""
    return Slices(tensor.numel(), {0: tensor.detach().view(-1)})


def add(slices: dict[str, Slices], key: str, numel: int, start: int, values: torch.Tensor) -> None:
    """Note that `values` are the elements from `start` on of the tensor `key`."""
    slices.setdefault(key, Slices(numel)).parts[start] = values


class SliceSavePlanner(DefaultSavePlanner):
    """Plans the writing of a dict of `Slices`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, slices in self.state_dict.items():
            for chunk in slices.chunks():
                properties = TensorProperties.create_from_tensor(slices.parts[chunk.offsets[0]])
                data = TensorWriteData(chunk, properties, torch.Size([slices.numel]))
                index = MetadataIndex(key, chunk.offsets)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].part(index)


class SliceLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of a dict of `Slices`, in place, from slices cut in any way."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Slices], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # Without the base class's, which goes into the values in search of meta tensors and spoils dataclasses.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items = []
        for key, slices in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(key)
            if stored is None:
                raise ValueError(f"the checkpoint's index has no {key}")
            if stored.size.numel() != slices.numel:
                raise ValueError(f"{key} has {stored.size.numel()} elements in the checkpoint, {slices.numel} here")
            items += create_read_items_for_chunk_list(key, stored, slices.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].part(index)


class _ChecksummedFile(io.BufferedWriter):
    """A file that computes the CRC-32 of what is written; it is written from its beginning to its end."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "wb"))
        self.crc, self.bytes = 0, 0

    def write(self, data: bytes) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.bytes += memoryview(data).nbytes
        return super().write(data)


class _ChecksummingFileSystem(FileSystem):
    """Notes size and checksum of every file written; `files` maps a name to them."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, object]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            raise ValueError(f"{path}: opened with mode {mode!r} while writing a checkpoint")
        with _ChecksummedFile(Path(path)) as stream:
            yield stream
        self.files[Path(path).name] = {"bytes": stream.bytes, "crc32": f"{stream.crc:08x}"}

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class SliceWriter(FileSystemWriter):
    """DCP's writer, one synced file for each rank, that knows the size and checksum of what this rank wrote."""

    def __init__(self, folder: Path):
        super().__init__(folder, sync_files=True, overwrite=False)
        self.fs = _ChecksummingFileSystem()

    @property
    def files(self) -> dict[str, dict[str, object]]:
        return self.fs.files


class SliceReader:
    """Reads slices in one process, without a process group. The index is read once."""

    def __init__(self, folder: Path):
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def dtype(self, key: str) -> torch.dtype:
        return self._metadata.state_dict_metadata[key].properties.dtype

    def stored_bytes(self) -> dict[str, int]:
        """The bytes of every tensor, by key."""
        return {
            key: stored.size.numel() * stored.properties.dtype.itemsize
            for key, stored in self._metadata.state_dict_metadata.items()
        }

    def chunks(self, key: str) -> list[tuple[int, int]]:
        """The (start, numel) of the slices as they were written, in order."""
        chunks = self._metadata.state_dict_metadata[key].chunks
        return sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in chunks)

    def read(self, slices: Mapping[str, Slices]) -> None:
        """Fill the slices' memory from the files."""
        planner = SliceLoadPlanner()
        planner.set_up_planner(dict(slices), self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
