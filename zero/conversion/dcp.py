"""torch's distributed checkpoints (DCP): reads and writes those of FSDP through accelerate.

    .metadata            a pickle: the chunks of each tensor, and where they are
    __RANK_N.distcp      chunks, and other values, each as a file of `torch.save`

There is one such folder for the model and one for the optimizer, whose state is called
`optimizer.state.NAME.exp_avg`. FSDP's chunks divide a tensor along its first dimension."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint.files import Stored
from zero.conversion import full, pickles
from zero.conversion.named import named_state, state_dicts
from zero.conversion.ours import copy_beside
from zero.conversion.training_state import TrainingState
from zero.errors import DamagedCheckpointError, UsageError

METADATA = ".metadata"
MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"


def recognizes(folder: Path) -> bool:
    return (folder / MODEL_FOLDER / METADATA).is_file()


def read(folder: Path) -> TrainingState:
    """Return the state in a folder.

    Raises UsageError, which names the file, if it cannot be read, or has no optimizer state.
    """
    weights = {
        name.removeprefix("model."): value
        for name, value in _open(folder / MODEL_FOLDER).items()
        if isinstance(value, Stored)
    }
    optimizer: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in _open(folder / OPTIMIZER_FOLDER).items():
        kind, _, rest = key.removeprefix("optimizer.").partition(".")
        name, _, option = rest.rpartition(".")
        target = groups if kind == "param_groups" else optimizer
        target.setdefault(name, {})[option] = value
    ordered = [groups[number] for number in sorted(groups, key=int)]
    if not ordered or not all(isinstance(group.get("params"), list) for group in ordered):
        place = folder / OPTIMIZER_FOLDER
        raise UsageError(f"{place}: it has no param groups that name their parameters")
    model = full.model_of(folder) if (folder / "config.json").is_file() else None
    return named_state("accelerate's FSDP", folder, weights, optimizer, ordered, model)


# -- the files


def _open(folder: Path) -> dict[str, Any]:
    """Return everything in a folder by its name: tensors, and other values."""
    path = folder / METADATA
    try:
        metadata = pickles.load_plain(path)
        places = {_identity(index): info for index, info in metadata.storage_data.items()}
        return {
            name: _tensor(folder, name, entry, places)
            if entry.kind.name == "TensorStorageMetadata"
            else _load(folder, places[name, None])
            for name, entry in metadata.state_dict_metadata.items()
        }
    except FileNotFoundError:
        raise UsageError(f"{path} is missing") from None
    except (AttributeError, LookupError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _identity(index: pickles.Record) -> tuple[str, tuple[int, ...] | None]:
    offset = index.state.get("offset")
    return index.fqn, None if offset is None else tuple(offset)


def _load(folder: Path, info: pickles.Record) -> Any:
    file = Path(info.relative_path)
    if file.name != info.relative_path or info.state.get("transform_descriptors"):
        raise UsageError(f"{folder / METADATA}: {file} is elsewhere, or compressed")
    return pickles.load(folder / file, info.offset, info.offset + info.length)


def _tensor(folder: Path, name: str, entry: pickles.Record, places: dict) -> Stored:
    """Return a tensor of chunks that follow each other along its first dimension."""
    shape, dtype = tuple(entry.size), entry.properties.state[0]
    wrong = f"{folder / METADATA}: {name} has "
    found, position = [], 0
    for offsets, sizes in sorted((tuple(each.offsets), tuple(each.sizes)) for each in entry.chunks):
        if 0 in sizes:
            continue
        if len(sizes) != len(shape) or sizes[1:] != shape[1:]:
            what = "chunks along other dimensions than its first, as by tensor parallelism"
            raise UsageError(f"{wrong}{what}: save it with FSDP alone")
        if sum(offsets[:1]) != position or any(offsets[1:]):
            raise DamagedCheckpointError(f"{wrong}chunks that overlap, or one of them is missing")
        values = _load(folder, places[name, offsets])
        if not isinstance(values, Stored) or values.dtype != dtype:
            raise DamagedCheckpointError(f"{wrong}a chunk that is no tensor of {dtype}")
        if values.numel() != math.prod(sizes) or (values.shape != sizes and values.numel() > 1):
            raise DamagedCheckpointError(f"{wrong}a chunk of the shape {list(values.shape)}")
        found.append(values)
        position += sizes[0] if sizes else 1
    if position != (shape[0] if shape else 1) and math.prod(shape):
        raise DamagedCheckpointError(f"{wrong}chunks that overlap, or one of them is missing")
    if not found:
        return Stored.of(torch.empty(shape, dtype=dtype, device="cpu"))
    return Stored.joined(found, shape)


# -- write


def write(state: TrainingState, out: Path) -> None:
    """Write what accelerate's FSDP loads, with any number of ranks.

    The values are in a temporary file on the way. Raises OSError if the disk has no space for them.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    model, optimizer = state_dicts(state)
    for group in optimizer["param_groups"]:
        # an optimizer asks for all of its options
        defaults = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
        defaults |= {"initial_lr": group["lr"], "maximize": False, "decoupled_weight_decay": True}
        group |= {key: value for key, value in defaults.items() if key not in group}
    out.mkdir(parents=True, exist_ok=True)
    parts = {MODEL_FOLDER: {"model": model}, OPTIMIZER_FOLDER: {"optimizer": optimizer}}
    for name, content in parts.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            try:
                checkpoint.save(content, checkpoint_id=out / name, no_dist=True)
            except CheckpointException as error:  # no Exception; it has those of all ranks
                raise error.failures[0][0] from None
    copy_beside(state, out)
