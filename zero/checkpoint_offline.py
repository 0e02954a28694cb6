"""What can be done with a checkpoint in one process without an engine: look at it, read it, make a model folder of it.

`consolidate` holds no more of the model in memory than a few slices as they were written, of at most
`checkpoint_slices.MAX_SLICE` elements each.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from zero import checkpoint_folder as folders
from zero.checkpoint_slices import SliceReader, Slices, whole
from zero.checkpoint_values import decode, dtype_name, dtype_of

# safetensors' names of dtypes; see its documentation of the format.
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Stored:
    """A tensor of the model in a checkpoint: where it is and what it becomes."""

    name: str
    key: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def open_checkpoint(path: str | os.PathLike, tag: str | None = None) -> tuple[Path, dict]:
    """The folder and the description of a checkpoint: its own folder, or one that has it, such as `checkpoint-500`.

    Raises ValueError if there is none or its description is damaged.
    """
    folder = folders.locate(Path(path), tag)
    if folder is None:
        raise ValueError(f"{path}: there is no checkpoint")
    return folder, folders.read_description(folder)


def _verify(folder: Path, description: dict) -> None:
    try:
        folders.verify(folder, description["files"].items())
    except folders.DamagedCheckpointError as error:
        raise folders.DamagedCheckpointError(f"{error}{folders.offer(folder)}") from error


def _model_tensors(description: dict, dtype: torch.dtype | None, exclude_frozen: bool = False) -> Iterator[Stored]:
    """The model's tensors, tied ones once; floating-point ones of `dtype`, None: of the dtype they are trained in."""
    for name, entry in description["parameters"].items():
        if entry["trainable"] or not exclude_frozen:
            yield Stored(name, f"weights/{name}", torch.Size(entry["shape"]), dtype or dtype_of(entry["dtype"]))
    for name, entry in description["plain"].items():
        own = dtype_of(entry["dtype"])
        yield Stored(name, f"plain/{name}", torch.Size(entry["shape"]), (own.is_floating_point and dtype) or own)


# -- into memory


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """The whole model's state dict in fp32 in host memory; tied weights are one tensor under each of their names.

    Args:
        checkpoint_dir: the folder given to `save_checkpoint`, or the checkpoint's own. tag: which; default: the latest.

    Raises:
        ValueError: there is no such checkpoint, or a file of it is damaged.
    """
    folder, description = open_checkpoint(checkpoint_dir, tag)
    _verify(folder, description)
    reader = SliceReader(folder)
    state = {}
    for tensor in _model_tensors(description, torch.float32, exclude_frozen_parameters):
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
        reader.read({tensor.key: whole(value)})
        state[tensor.name] = value
    for name, first in description["tied"].items():
        if first in state:
            state[name] = state[first]
    return state


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike, tag: str | None = None
) -> nn.Module:
    """Put a checkpoint's weights, fp32 masters where there are any, into an ordinary model on the host; return it.

    Raises:
        ValueError: there is no such checkpoint, or a file of it is damaged. RuntimeError: the names or shapes differ.
    """
    _, description = open_checkpoint(checkpoint_dir, tag)
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu().load_state_dict(state, strict=not description["frozen_excluded"])
    return model


# -- into a model folder


@dataclass
class _File:
    """One safetensors file to be written."""

    tensors: list[Stored] = field(default_factory=list)
    nbytes: int = 0


def consolidate(
    checkpoint: str | os.PathLike,
    out: str | os.PathLike,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: bool = False,
) -> list[Path]:
    """Write the model of a training checkpoint as safetensors, with index and `config.json`, for `from_pretrained`.

    Args:
        checkpoint: its folder, or one that has it. out: the folder to write to; made if need be.
        dtype: of floating-point weights, rounded from the fp32 masters; None: the one they are trained in.
        max_file_bytes: a new file begins where one would become larger, unless a single tensor is.
        progress: show a bar on stderr.

    Returns the files written. Raises ValueError for a damaged or missing checkpoint or a folder that already holds a
    model, OSError where the disk cannot take it; nothing is left half-written under a final name.
    """
    folder, description = open_checkpoint(checkpoint)
    target = Path(out)
    if existing := sorted(path.name for path in target.glob("model*.safetensors*")):
        raise ValueError(f"{target} already holds a model ({existing[0]}); choose another folder or remove it")
    _verify(folder, description)
    files = _distribute(_model_tensors(description, dtype), max_file_bytes)
    total = sum(file.nbytes for file in files)
    target.mkdir(parents=True, exist_ok=True)
    if total > (free := shutil.disk_usage(target).free):
        raise OSError(f"{target}: the model takes {folders.megabytes(total)} and {folders.megabytes(free)} are free")

    reader = SliceReader(folder)
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        names = ["model.safetensors"]
    with tqdm(total=total, unit="B", unit_scale=True, desc="consolidate", disable=not progress) as bar:
        for name, file in zip(names, files, strict=True):
            _write_safetensors(target / name, file.tensors, reader, bar)
    written = [target / name for name in names]
    if len(files) > 1:
        weight_map = {tensor.name: name for name, file in zip(names, files, strict=True) for tensor in file.tensors}
        written.append(target / "model.safetensors.index.json")
        _write_json(written[-1], {"metadata": {"total_size": total}, "weight_map": weight_map})
    if description["model_config"] is not None:
        trained_in = next(iter(description["parameters"].values()))["dtype"]
        written.append(target / "config.json")
        _write_json(written[-1], description["model_config"] | {"dtype": dtype_name(dtype) if dtype else trained_in})
    return written


def _distribute(tensors: Iterator[Stored], max_file_bytes: int) -> list[_File]:
    files = [_File()]
    for tensor in tensors:
        if files[-1].tensors and files[-1].nbytes + tensor.nbytes > max_file_bytes:
            files.append(_File())
        files[-1].tensors.append(tensor)
        files[-1].nbytes += tensor.nbytes
    return files


def _write_safetensors(path: Path, tensors: list[Stored], reader: SliceReader, bar: tqdm) -> None:
    """Write a file of the safetensors format slice by slice (the library's writer wants all tensors in memory)."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _SAFETENSORS[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data
    temporary = path.with_name(f".{path.name}")
    try:
        with open(temporary, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for tensor in tensors:
                for start, numel in reader.chunks(tensor.key):
                    part = torch.empty(numel, dtype=reader.dtype(tensor.key))
                    reader.read({tensor.key: Slices(tensor.shape.numel(), {start: part})})
                    part = part.to(tensor.dtype)
                    file.write(part.view(torch.uint8).numpy().data)
                    bar.update(part.nbytes)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# -- for reading by people


def describe(checkpoint: str | os.PathLike) -> str:
    """What a checkpoint holds, a line for each thing; ValueError names the file if one is damaged."""
    folder, description = open_checkpoint(checkpoint)
    _verify(folder, description)
    sizes: dict[str, int] = {}
    for key, nbytes in SliceReader(folder).stored_bytes().items():
        kind, rest = key.split("/", 1)
        kind = f"optimizer {rest.split('/', 1)[0]}" if kind == "optimizer" else {"plain": "buffers"}.get(kind, kind)
        sizes[kind] = sizes.get(kind, 0) + nbytes
    parameters = description["parameters"].values()
    count = sum(torch.Size(entry["shape"]).numel() for entry in parameters)
    trained = sum(torch.Size(entry["shape"]).numel() for entry in parameters if entry["trainable"])
    dtypes = ", ".join(sorted({entry["dtype"] for entry in parameters}))
    optimizer, scaler = description["optimizer"], description["loss_scaler"]
    lines = [
        f"checkpoint   {folder}",
        f"written      {description['time']}, torch {description['torch']}, format {description['version']}",
        f"by           {description['world_size']} ranks, stage {description['stage']}",
        f"steps        {description['global_steps']} ({description['skipped_steps']} skipped)",
        f"parameters   {count:,}, {trained:,} of them trained, computing in {dtypes}",
        f"optimizer    {optimizer['classes'][0] if optimizer else 'none'}",
        f"scheduler    {description['lr_scheduler'] or 'none'}",
        f"loss scale   {scaler['scale'] if scaler else 'none'}",
        f"client state {', '.join(map(str, decode(description['client_state']))) or 'none'}",
        "",
        *(f"{folders.megabytes(nbytes):>16}  {kind}" for kind, nbytes in sizes.items()),
        "",
        *(
            f"{folders.megabytes(entry['bytes']):>16}  {name}  crc32 {entry['crc32']}, verified"
            for name, entry in description["files"].items()
        ),
    ]
    return "\n".join(lines)
