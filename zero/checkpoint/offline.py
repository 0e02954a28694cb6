"""What can be done with a checkpoint in one process without an engine: look at it, read it, make a
model folder of it.

`consolidate` holds no more of the model in memory than `PART` elements, or one parameter that was
cut over ranks. What is read is verified as it is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from zero.checkpoint import folder as folders
from zero.checkpoint.cuts import PartReader
from zero.checkpoint.files import SliceReader, Slices, check_sizes, whole
from zero.checkpoint.manifest import Manifest, read_manifest
from zero.checkpoint.model import MAX_FILE_BYTES, TensorSpec, write_model
from zero.checkpoint.values import decode, dtype_of
from zero.errors import UsageError

# Elements of a tensor that are read and written at a time.
PART = 1 << 22


def _open(path: str | os.PathLike, tag: str | None = None) -> PartReader:
    """A reader of a checkpoint. `path` is its own folder, or a folder that contains it, such as
    `checkpoint-500`.

    Raises ValueError if there is no checkpoint, or if a file of it is missing.
    """
    folder = folders.locate(Path(path), tag)
    if folder is None:
        raise UsageError(
            f"{path}: there is no checkpoint; name its folder, such as output/checkpoint-500"
        )
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    return PartReader(folder, manifest)


def _model_tensors(
    manifest: Manifest, dtype: torch.dtype | None, exclude_frozen: bool = False
) -> Iterator[tuple[str, TensorSpec]]:
    """The model's tensors with their keys in the checkpoint, tied ones once.

    Floating-point ones become `dtype`; None: the one they are trained in.
    """
    for name, entry in manifest.parameters.items():
        if entry.trainable or not exclude_frozen:
            yield (
                f"weights/{name}",
                TensorSpec(name, torch.Size(entry.shape), dtype or dtype_of(entry.dtype)),
            )
    for name, entry in manifest.plain.items():
        own = dtype_of(entry.dtype)
        yield (
            f"plain/{name}",
            TensorSpec(name, torch.Size(entry.shape), (own.is_floating_point and dtype) or own),
        )


# -- into memory


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> dict[str, torch.Tensor]:
    """The whole model's state dict in fp32 in host memory; tied weights are one tensor under each
    of their names.

    Args:
        checkpoint_dir: the folder given to `save_checkpoint`, or the checkpoint's own. tag: which;
        default: the latest.

    Raises:
        ValueError: there is no such checkpoint, or a file of it is damaged.
    """
    return _state_dict(_open(checkpoint_dir, tag), exclude_frozen_parameters)


def _state_dict(reader: SliceReader, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    state, slices = {}, {}
    for key, tensor in _model_tensors(reader.manifest, torch.float32, exclude_frozen):
        reader.check(key, tensor.shape.numel())
        state[tensor.name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        slices[key] = whole(state[tensor.name])
    reader.read(slices)
    tied = reader.manifest.tied.items()
    return state | {name: state[first] for name, first in tied if first in state}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike, tag: str | None = None
) -> nn.Module:
    """Put a checkpoint's weights, fp32 masters where there are any, into an ordinary model on the
    host; return it.

    Raises:
        ValueError: there is no such checkpoint, or a file of it is damaged. RuntimeError: the names
        or shapes differ.
    """
    reader = _open(checkpoint_dir, tag)
    model.cpu().load_state_dict(_state_dict(reader), strict=not reader.manifest.frozen_excluded)
    return model


# -- into a model folder


def consolidate(
    checkpoint: str | os.PathLike,
    out: str | os.PathLike,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: bool = False,
) -> list[Path]:
    """Write the model of a training checkpoint as safetensors, with index and `config.json`, for
    `from_pretrained`.

    Args:
        checkpoint: its folder, or one that has it. out: the folder to write to; made if need be.
        dtype: of floating-point weights, rounded from the fp32 masters; None: the one they are
        trained in. max_file_bytes: a new file begins where one would become larger, unless a single
        tensor is. progress: show a bar on stderr.

    Returns the files written. Raises ValueError for a damaged or missing checkpoint or a folder
    that already holds a model, OSError where the disk cannot take it; nothing is left half-written
    under a final name."""
    if existing := sorted(path.name for path in Path(out).glob("model*.safetensors*")):
        raise UsageError(
            f"{out} already holds a model ({existing[0]}); choose another folder or remove it"
        )
    reader = _open(checkpoint)
    tensors = dict(_model_tensors(reader.manifest, dtype))
    for key, tensor in tensors.items():
        reader.check(key, tensor.shape.numel())
    nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def parts() -> Iterator[torch.Tensor]:
        with tqdm(
            total=nbytes, unit="B", unit_scale=True, desc="consolidate", disable=not progress
        ) as bar:
            for key, tensor in tensors.items():
                numel = tensor.shape.numel()
                step = (
                    PART if reader.stored_cut(key) is None else numel
                )  # parts are joined as a whole
                for start in range(0, numel, step):
                    part = torch.empty(min(step, numel - start), dtype=tensor.dtype, device="cpu")
                    reader.read({key: Slices(numel, {start: part})})
                    bar.update(part.nbytes)
                    yield part
                    del part  # so that there are never two

    return write_model(
        Path(out),
        list(tensors.values()),
        parts(),
        reader.manifest.hf_config,
        max_file_bytes=max_file_bytes,
    )


# -- for reading by people


def facts(checkpoint: str | os.PathLike, progress: bool = False) -> dict[str, Any]:
    """What a checkpoint holds, for JSON; ValueError names the file if one is damaged. Sizes are
    bytes.

    progress: show a bar on stderr, if that is a terminal.
    """
    reader = _open(checkpoint)
    manifest, sizes = reader.manifest, {}
    nbytes = sum(entry.bytes for entry in manifest.files.values())
    shown = None if progress else True  # None: on a terminal only
    with tqdm(
        total=nbytes, unit="B", unit_scale=True, desc="checksums", disable=shown, leave=False
    ) as bar:
        reader.verify(bar.update)
    for key, nbytes in reader.stored_bytes().items():
        kind, _, rest = key.partition("/")
        kind = (
            f"optimizer {rest.split('/', 1)[0]}"
            if kind == "optimizer"
            else {"plain": "buffers"}.get(kind, kind)
        )
        sizes[kind] = sizes.get(kind, 0) + nbytes
    parameters, optimizer = manifest.parameters.values(), manifest.optimizer
    count, trained = (
        sum(torch.Size(entry.shape).numel() for entry in of_kind)
        for of_kind in (parameters, [entry for entry in parameters if entry.trainable])
    )
    scaler = decode(manifest.loss_scaler)
    return {
        "checkpoint": str(reader.folder),
        "written": manifest.time,
        "torch": manifest.torch,
        "format": manifest.version,
        "ranks": manifest.world_size,
        "stage": manifest.stage,
        "steps": manifest.global_steps,
        "skipped_steps": manifest.skipped_steps,
        "parameters": count,
        "trained_parameters": trained,
        "dtypes": sorted({entry.dtype for entry in parameters}),
        "optimizer": optimizer.classes[0] if optimizer else None,
        "scheduler": manifest.lr_scheduler,
        "loss_scale": scaler.get("scale") if isinstance(scaler, dict) else None,
        "client_state": list(map(str, decode(manifest.client_state))),
        "bytes": sizes,
        "files": {
            name: {"bytes": entry.bytes, "checksums": len(entry.sums)}
            for name, entry in manifest.files.items()
        },
    }


def describe(found: dict[str, Any]) -> str:
    """`facts` as text, a line for each thing."""
    lines = [
        f"checkpoint   {found['checkpoint']}",
        f"written      {found['written']}, torch {found['torch']}, format {found['format']}",
        f"by           {found['ranks']} ranks, stage {found['stage']}",
        f"steps        {found['steps']} ({found['skipped_steps']} skipped)",
        f"parameters   {found['parameters']:,}, {found['trained_parameters']:,} of them trained, "
        "computing in "
        f"{', '.join(found['dtypes'])}",
        *(
            f"{key.replace('_', ' '):<12} {found[key] or 'none'}"
            for key in ("optimizer", "scheduler", "loss_scale")
        ),
        f"client state {', '.join(found['client_state']) or 'none'}",
        "",
        *(f"{folders.megabytes(nbytes):>16}  {kind}" for kind, nbytes in found["bytes"].items()),
        "",
        *(
            f"{folders.megabytes(entry['bytes']):>16}  {name}  {entry['checksums']} checksums "
            "verified"
            for name, entry in found["files"].items()
        ),
    ]
    return "\n".join(lines)
