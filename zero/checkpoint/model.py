"""Model folders that `from_pretrained` loads: safetensors files written part by part, their index and `config.json`.

The safetensors library's own writer wants all tensors of a file in memory; the format does not.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import nn

from zero.checkpoint.folder import megabytes

# safetensors' names of dtypes; see its documentation of the format.
_SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MODEL_FILE = "model.safetensors"
MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its name, shape and dtype."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class _File:
    name: str = ""
    tensors: list[TensorSpec] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def header(self) -> bytes:
        entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        position = 0
        for tensor in self.tensors:
            end = position + tensor.nbytes
            entries[tensor.name] = {
                "dtype": _SAFETENSORS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            position = end
        encoded = json.dumps(entries, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # the format aligns the data
        return len(encoded).to_bytes(8, "little") + encoded


class ModelWriter:
    """Writes known tensors whose values come part by part, in order; `with` makes the files visible at its end.

    Args:
        folder: made if need be. tensors: what will be written, in this order. filename: of the only file, and the
        pattern of several and of their index, as transformers names them. max_file_bytes: a new file begins where one
        would become larger, unless a single tensor is.

    Raises:
        OSError: the disk cannot take it. Until the end of `with` files have hidden names; after an error none is left.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[TensorSpec],
        filename: str = MODEL_FILE,
        max_file_bytes: int = MAX_FILE_BYTES,
    ):
        self.folder, self.filename = folder, filename
        self._files = [_File()]
        for tensor in tensors:
            if self._files[-1].tensors and self._files[-1].nbytes + tensor.nbytes > max_file_bytes:
                self._files.append(_File())
            self._files[-1].tensors.append(tensor)
        stem, count = filename.removesuffix(".safetensors"), len(self._files)
        for number, file in enumerate(self._files, 1):
            file.name = filename if count == 1 else f"{stem}-{number:05}-of-{count:05}.safetensors"
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        folder.mkdir(parents=True, exist_ok=True)
        if self.nbytes > (free := shutil.disk_usage(folder).free):
            raise OSError(f"{folder}: the model takes {megabytes(self.nbytes)} and {megabytes(free)} are free")
        self._open: BinaryIO | None = None
        self._left, self._next = 0, 0

    def __enter__(self) -> ModelWriter:
        return self

    def write(self, values: torch.Tensor) -> None:
        """The next values, in host memory: a tensor, or a part of one, in the dtype announced for it."""
        if self._left == 0:
            self._begin_file()
        self._left -= self._open.write(_bytes_of(values))

    def _begin_file(self) -> None:
        self._end_file()
        file = self._files[self._next]
        self._open = open(self._hidden(file), "wb")
        self._open.write(file.header())
        self._left, self._next = file.nbytes, self._next + 1

    def _end_file(self) -> None:
        if self._open is not None:
            self._open.flush()
            os.fsync(self._open.fileno())
            self._open.close()
            self._open = None

    def _hidden(self, file: _File) -> Path:
        return self.folder / f".{file.name}"

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                assert self._left == 0 and self._next == len(self._files), "tensors are missing"
                self._end_file()
                for file in self._files:
                    self._hidden(file).replace(self.folder / file.name)
                self._write_index()
        finally:
            if self._open is not None:
                self._open.close()
            for file in self._files:
                self._hidden(file).unlink(missing_ok=True)

    def _write_index(self) -> None:
        """The index of several files; and what an earlier model of the same name had besides is removed."""
        stem, index = re.escape(self.filename.removesuffix(".safetensors")), f"{self.filename}.index.json"
        current = {file.name for file in self._files} | ({index} if len(self._files) > 1 else set())
        if len(self._files) > 1:
            places = {tensor.name: file.name for file in self._files for tensor in file.tensors}
            write_json(self.folder / index, {"metadata": {"total_size": self.nbytes}, "weight_map": places})
        for path in self.folder.iterdir():
            if path.name not in current and re.fullmatch(
                rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?", path.name
            ):
                path.unlink()

    @property
    def written(self) -> list[Path]:
        """The files, with the index last where there is one."""
        names = [file.name for file in self._files]
        return [self.folder / name for name in names + [f"{self.filename}.index.json"] * (len(names) > 1)]


def _bytes_of(values: torch.Tensor) -> memoryview:
    return memoryview(values.detach().contiguous().view(-1).view(torch.uint8).numpy())


def model_config(model: nn.Module) -> dict | None:
    """What transformers writes to `config.json`, if this is one of its models."""
    as_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if as_json is None:
        return None
    return json.loads(as_json(use_diff=False)) | {"architectures": [type(model).__name__]}


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# -- a state dict outside of the process's own memory


# Bytes of a mapped model that may count as the process's own.
_RESIDENT = 1 << 29


def _unmap_pages(mapped: weakref.ref[mmap.mmap]) -> None:
    """Again and again as long as the mapping is used: pages that were read stay in the system's cache alone.

    They would be dropped when memory is short, but limits on resident memory count them until then.
    """
    while (memory := mapped()) is not None:
        memory.madvise(mmap.MADV_DONTNEED)
        del memory
        time.sleep(0.02)


def on_disk(tensors: Iterable[tuple[str, torch.Tensor]], nbytes: int) -> dict[str, torch.Tensor]:
    """Copies of tensors in host memory that lie in a file without a name, mapped into memory.

    The kernel reads and drops their pages as needed, so they take none of the process's own memory; the space on the
    disk is free again when the last of them is gone. The file is made where temporary files go (`TMPDIR`), or in the
    working directory if only that has room for `nbytes`.

    Raises OSError if there is no such room.
    """
    places = [tempfile.gettempdir(), os.getcwd()]
    place = next((place for place in places if shutil.disk_usage(place).free > nbytes), None)
    if place is None:
        raise OSError(
            f"no room for the {megabytes(nbytes)} of the model in {' or '.join(places)}; set TMPDIR to a disk"
        )
    entries: list[tuple[str, torch.Size, torch.dtype, int]] = []
    with tempfile.TemporaryFile(dir=place) as file:
        for name, tensor in tensors:
            file.write(b"\0" * (-file.tell() % 64))
            entries.append((name, tensor.shape, tensor.dtype, file.tell()))
            file.write(_bytes_of(tensor))
        file.write(b"\0")  # an empty file cannot be mapped
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE)
    if nbytes > _RESIDENT:
        threading.Thread(target=_unmap_pages, args=(weakref.ref(mapped),), daemon=True).start()
    return {
        name: torch.frombuffer(mapped, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
        if shape.numel()
        else torch.empty(shape, dtype=dtype)
        for name, shape, dtype, offset in entries
    }
