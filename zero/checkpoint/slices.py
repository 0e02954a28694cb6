"""Tensors as slices of their flattened selves, in files of torch.distributed.checkpoint (DCP).

[Note: slices]
Whatever the units and tiles of a run look like, a checkpoint knows a tensor only by its parameter's name, and its
values by their position in the flattened tensor. Each rank writes the slices that it holds; DCP's metadata says which
file holds which range. A reader with other shards asks for other ranges, and gets them put together from the files.

That metadata is a pickle: read only checkpoints that you trust.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import struct
import zipfile
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config as serialization

from zero.checkpoint.ranks import Ranks

# Elements in one record of a file, which is read as a whole. Small enough for malloc to use its memory again.
MAX_SLICE = 1 << 22
# The end of a record that surely has the directory of the archive in it.
_DIRECTORY = 4096


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
        return [ChunkStorageMetadata(torch.Size([at]), part.shape) for at, part in self.parts.items()]


def whole(tensor: torch.Tensor) -> Slices:
    """A tensor that this rank holds completely; what is read goes to its memory, so it must be contiguous."""
    return Slices(tensor.numel(), {0: tensor.detach().view(-1)})


def add(slices: dict[str, Slices], key: str, numel: int, start: int, values: torch.Tensor) -> None:
    """Note that `values` are the elements from `start` on of the tensor `key`."""
    slices.setdefault(key, Slices(numel)).parts[start] = values


# -- writing


class _SavePlanner(DefaultSavePlanner):
    """Plans the writing of a dict of `Slices`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, slices in self.state_dict.items():
            for chunk, part in zip(slices.chunks(), slices.parts.values(), strict=True):
                properties = TensorProperties.create_from_tensor(part)
                data = TensorWriteData(chunk, properties, torch.Size([slices.numel]))
                items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        part = self.state_dict[index.fqn].parts[index.offset[0]]
        if part.device.type != "cpu":
            return part
        # With a storage of its own size, though not its own memory: the writer would copy it otherwise.
        begin = part.storage_offset() * part.itemsize
        return part.new_empty(0).set_(part.untyped_storage()[begin : begin + part.nbytes])


class _ChecksummedFile(io.BufferedWriter):
    """Computes the CRC-32 of what is written, from its beginning to its end; durable once closed."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(io.FileIO(path, "wb"))
        self.crc = self.bytes = 0
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        self.crc = zlib.crc32(data, self.crc)
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                self.bytes = self.tell()
                os.fsync(self.fileno())
        finally:
            super().close()


class _ChecksummingFileSystem(FileSystem):
    """Notes size and checksum of every file written; `files` maps a name to them."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, object]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            raise ValueError(f"{path}: opened with mode {mode!r} while writing a checkpoint")
        with _ChecksummedFile(path) as stream:
            try:
                yield stream
            except RuntimeError as error:
                if stream.failure is None:
                    raise
                raise stream.failure from error  # torch.save cannot end what it began, and says that instead
        # DCP writes its index under a name of its own, and renames it.
        name = Path(path).name.removesuffix(".tmp")
        self.files[name] = {"bytes": stream.bytes, "crc32": f"{stream.crc:08x}"}


class SliceWriter(FileSystemWriter):
    """DCP's writer, one file for each rank, that knows the size and checksum of what this rank wrote."""

    def __init__(self, folder: Path):
        super().__init__(folder, sync_files=False, overwrite=False)  # files are synced as they are closed
        self.fs = _ChecksummingFileSystem()


def write(slices: dict[str, Slices], folder: Path, ranks: Ranks) -> dict[str, dict[str, object]]:
    """Write all ranks' slices and their index; returns size and checksum of every file. Every rank must call it.

    `torch.distributed.checkpoint.save` in its own steps, since its collectives need a registered process group.
    """
    planner, writer = _SavePlanner(), SliceWriter(folder)
    planner.set_up_planner(slices, is_coordinator=ranks.rank == 0)
    writer.set_up_storage_writer(is_coordinator=ranks.rank == 0)
    plans = ranks.each(lambda: writer.prepare_local_plan(planner.create_local_plan()))

    def write_own() -> list[WriteResult]:
        # Every rank makes the same plan for all, so that none has to be handed out.
        of_ranks = writer.prepare_global_plan(planner.create_global_plan(plans)[0])
        # The file has a checksum; those of its records would take as long again.
        with serialization.patch("save.compute_crc32", False):
            return writer.write_data(planner.finish_plan(of_ranks[ranks.rank]), planner).wait()

    results = ranks.each(write_own)
    ranks.on_first(lambda: writer.finish(planner.metadata, results))
    return {name: entry for files in ranks.gather(writer.fs.files) for name, entry in files.items()}


# -- reading


class SliceReader:
    """Reads slices in one process, without a process group. The index is read once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._metadata = FileSystemReader(folder).read_metadata()
        self.tensors = self._metadata.state_dict_metadata

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].properties.dtype

    def stored_bytes(self) -> dict[str, int]:
        """The bytes of every tensor, by key."""
        return {key: stored.size.numel() * stored.properties.dtype.itemsize for key, stored in self.tensors.items()}

    def chunks(self, key: str) -> list[tuple[int, int]]:
        """The (start, numel) of the slices as they were written, in order; none of an empty tensor."""
        chunks = self.tensors[key].chunks if key in self.tensors else []
        return sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in chunks)

    def read(self, slices: Mapping[str, Slices]) -> None:
        """Fill the slices' memory from the files, straight into it: DCP's reader copies every record twice.

        Raises ValueError for a key that the checkpoint lacks or has in another size.
        """
        reads = [read for key, entry in slices.items() if entry.numel for read in self._reads(key, entry)]
        reads.sort(key=lambda read: (read.record.relative_path, read.record.offset, read.skipped))
        for name, group in itertools.groupby(reads, key=lambda read: read.record.relative_path):
            with open(self._folder / name, "rb", buffering=0) as file:
                for read in group:
                    read.into_target(file)

    def _reads(self, key: str, wanted: Slices) -> Iterator[_Read]:
        if key not in self.tensors:
            raise ValueError(f"the checkpoint's index has no {key}")
        if (stored := self.tensors[key].size.numel()) != wanted.numel:
            raise ValueError(f"{key} has {stored} elements in the checkpoint, {wanted.numel} here")
        chunks = self.chunks(key)
        for start, part in wanted.parts.items():
            for begin, numel in chunks:
                first, end = max(start, begin), min(start + part.numel(), begin + numel)
                if first < end:
                    record = self._metadata.storage_data[MetadataIndex(key, torch.Size([begin]))]
                    yield _Read(record, self.dtype(key), first - begin, part[first - start : end - start])


@dataclass
class _Read:
    """Elements of a record, from `skipped` on, that go to `target`."""

    record: _StorageInfo
    dtype: torch.dtype
    skipped: int
    target: torch.Tensor

    def into_target(self, file: io.RawIOBase) -> None:
        direct = self.target.device.type == "cpu" and self.target.dtype == self.dtype
        values = self.target if direct else torch.empty(self.target.shape, dtype=self.dtype, device="cpu")
        start = self._data_start(file) + self.skipped * self.dtype.itemsize
        _read_into(file, start, memoryview(values.view(torch.uint8).numpy()))
        if not direct:
            self.target.copy_(values)

    def _data_start(self, file: io.RawIOBase) -> int:
        """Where the values are in the file: a record is a zip archive, as `torch.save` writes it, uncompressed."""
        length = min(self.record.length, _DIRECTORY)
        begin = self.record.offset + self.record.length - length
        directory = zipfile.ZipFile(io.BytesIO(_read_into(file, begin, memoryview(bytearray(length)))))
        (entry,) = (info for info in directory.infolist() if info.filename.endswith("/data/0"))
        header = begin + entry.header_offset  # the archive was given without its beginning
        name, extra = struct.unpack("<HH", _read_into(file, header + 26, memoryview(bytearray(4))))
        return header + 30 + name + extra


def _read_into(file: io.RawIOBase, start: int, buffer: memoryview) -> memoryview:
    """Fill `buffer` with what is in the file from `start` on; return it."""
    file.seek(start)
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise OSError(errno.EIO, "the file ends too early", file.name)
        done += count
    return buffer
