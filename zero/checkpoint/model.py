"""Model folders that `from_pretrained` loads: safetensors files written part by part, their index
and `config.json`.

The safetensors library's own writer needs all tensors of a file in memory. The format does not need
that."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from zero.checkpoint.folder import megabytes
from zero.checkpoint.values import dtype_name

# safetensors' names of dtypes; see its documentation of the format.
_SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
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


def model_config(model: nn.Module) -> dict | None:
    """What transformers writes to `config.json`, if this is one of its models."""
    as_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if as_json is None:
        return None
    return json.loads(as_json(use_diff=False)) | {"architectures": [type(model).__name__]}


def write_model(
    folder: Path,
    tensors: Sequence[TensorSpec],
    parts: Iterator[torch.Tensor],
    config: dict | None,
    filename: str = MODEL_FILE,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write a model whose values come part by part; returns the files written.

    Args:
        folder: made if need be. Other files of an earlier model of the same name are removed at the
        end. tensors: what will be written. parts: their values in that order, each a tensor or a
        part of one, in host memory and in the dtype announced for it. config: for `config.json`,
        the dtype left out; None: there is none. filename: of the only file, and the pattern of
        several and of their index, as transformers names them. max_file_bytes: a new file begins
        where one would become larger, unless a single tensor is.

    Raises:
        OSError: the disk cannot take it. Until the end files have hidden names; after an error none
        is left.
    """
    nbytes = sum(tensor.nbytes for tensor in tensors)
    folder.mkdir(parents=True, exist_ok=True)
    if nbytes > (free := shutil.disk_usage(folder).free):
        raise OSError(
            f"{folder}: the model takes {megabytes(nbytes)} and {megabytes(free)} are free"
        )
    files = _cut(tensors, filename, max_file_bytes)
    try:
        for name, of_file in files.items():
            with open(folder / f".{name}", "wb") as file:
                file.write(header(of_file))
                for tensor in of_file:
                    left = tensor.nbytes
                    while left > 0:
                        left -= file.write(bytes_of(next(parts)))
                    assert left == 0, tensor.name
                file.flush()
                os.fsync(file.fileno())
        written = [(folder / f".{name}").replace(folder / name) for name in files]
    finally:
        for name in files:
            (folder / f".{name}").unlink(missing_ok=True)
    if len(files) > 1:
        written.append(folder / f"{filename}.index.json")
        places = {tensor.name: name for name, of_file in files.items() for tensor in of_file}
        _write_json(written[-1], {"metadata": {"total_size": nbytes}, "weight_map": places})
    ours = (
        re.escape(filename.removesuffix(".safetensors"))
        + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    )
    for path in folder.iterdir():
        if path not in written and re.fullmatch(ours, path.name):
            path.unlink()
    if config is not None:
        written.append(folder / "config.json")
        dtype = next(
            (tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point), torch.float32
        )
        _write_json(written[-1], config | {"dtype": dtype_name(dtype)})
    return written


def _cut(
    tensors: Sequence[TensorSpec], filename: str, max_file_bytes: int
) -> dict[str, list[TensorSpec]]:
    """The tensors of each file, by its name."""
    files: list[list[TensorSpec]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(other.nbytes for other in files[-1]) + tensor.nbytes > max_file_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return {filename: files[0]}
    stem = filename.removesuffix(".safetensors")
    return {
        f"{stem}-{number:05}-of-{len(files):05}.safetensors": file
        for number, file in enumerate(files, 1)
    }


def header(tensors: Iterable[TensorSpec]) -> bytes:
    """What a safetensors file of these tensors begins with."""
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        if tensor.dtype not in _SAFETENSORS:
            raise ValueError(
                f"{tensor.name}: safetensors has no {tensor.dtype}, so it cannot be stored"
            )
        entry = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        entries[tensor.name] = entry
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data
    return len(encoded).to_bytes(8, "little") + encoded


def bytes_of(values: torch.Tensor) -> memoryview:
    """Of a tensor in host memory."""
    return memoryview(values.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
