"""torch's distributed checkpoints (DCP): reads those of FSDP through accelerate, and of torchtitan,
and writes accelerate's.

    .metadata            a pickle: the chunks of each tensor, and where they are
    __RANK_N.distcp      chunks, and other values, each as a file of `torch.save`

accelerate has one such folder for the model and one for the optimizer. torchtitan has a single one.
Both call an optimizer's state `optimizer.state.NAME.exp_avg`.

Chunks that divide a tensor along its first dimension, as FSDP's do, are read in parts. A tensor
that is also divided along others, by tensor parallelism, is joined in memory."""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint.stored import Stored
from zero.conversion import full, pickles
from zero.conversion.named import named_state, state_dicts
from zero.conversion.ours import NO_SCHEDULE, copy_beside
from zero.conversion.training_state import TrainingState
from zero.errors import UsageError

METADATA = ".metadata"
MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
# What torchtitan keeps beside the model, whose names have no prefix there.
_BESIDE_MODEL = "optimizer.", "lr_scheduler.", "train_state.", "dataloader."


def recognizes(folder: Path) -> bool:
    places = [folder / METADATA, folder / MODEL_FOLDER / METADATA]
    return any(path.is_file() for path in places)


def read(folder: Path) -> TrainingState:
    """Return the state in a folder.

    Raises UsageError, which names the file, if it cannot be read, or has no optimizer state.
    """
    model_folder = folder / MODEL_FOLDER
    if (model_folder / METADATA).is_file():
        values = _open(model_folder) | _open(folder / OPTIMIZER_FOLDER)
        return _state(folder, values, "accelerate's FSDP")
    values = _open(folder)
    state = _state(folder, values, "torch's DCP")
    for name in ("train_state", "lr_scheduler", "dataloader"):
        prefix = f"{name}."
        found = {key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)}
        kept = pickles.without_records(found, state.missing, prefix + "{}")
        if name == "lr_scheduler" and kept:
            state.lr_scheduler = kept
            state.missing.remove(NO_SCHEDULE)
        elif kept:
            state.client_state[name] = kept
    return state


def _state(folder: Path, values: dict[str, Any], source: str) -> TrainingState:
    marker = ".param_groups."
    key = next((key for key in values if marker in key), None)
    if key is None:
        raise UsageError(f"{folder}: it has no state of an optimizer; zero loads the model alone")
    prefix = key[: key.index(marker) + 1]
    optimizer: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        kind, _, rest = key.removeprefix(prefix).partition(".")
        if key.startswith(prefix) and kind in ("state", "param_groups"):
            name, _, option = rest.rpartition(".")
            target = optimizer if kind == "state" else groups
            target.setdefault(name, {})[option] = value
    is_numbered = next(iter(groups)).isdecimal()
    ordered = [groups[key] for key in sorted(groups, key=int)] if is_numbered else _joined(groups)
    if not all(isinstance(group.get("params"), list) for group in ordered):
        raise UsageError(f"{folder}: its param groups do not name their parameters")
    tensors = {name: each for name, each in values.items() if isinstance(each, Stored)}
    first = next((str(name) for group in ordered for name in group["params"]), "")
    of_model = next((key for key in tensors if key.removesuffix(first) in ("", "model.")), None)
    if of_model is None:
        of_model = next((key for key in tensors if key.endswith(f".{first}")), first)
    model_prefix = of_model.removesuffix(first)
    weights = {
        name.removeprefix(model_prefix): each
        for name, each in tensors.items()
        if name.startswith(model_prefix)
        and not name.startswith(prefix)
        and (model_prefix or not name.startswith(_BESIDE_MODEL))
    }
    model = full.model_of(folder) if (folder / "config.json").is_file() else None
    return named_state(source, folder, weights, optimizer, ordered, model)


def _joined(of_names: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the param groups, if each parameter has its own options: one for equal options."""
    groups: list[dict[str, Any]] = []
    for name, options in of_names.items():
        same = (group for group in groups if group | {"params": 0} == options | {"params": 0})
        if (group := next(same, None)) is None:
            groups.append(options | {"params": [name]})
        else:
            group["params"].append(name)
    return groups


# -- the files


# The chunks of a tensor, each with its offsets.
_Chunks = tuple[tuple[tuple[int, ...], Stored], ...]


@lru_cache(maxsize=4)  # one for each thread that writes
def _whole(shape: tuple[int, ...], dtype: torch.dtype, chunks: _Chunks) -> torch.Tensor:
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    for offsets, values in chunks:
        place = (slice(first, first + n) for first, n in zip(offsets, values.shape, strict=True))
        whole[tuple(place)] = values.tensor()
    return whole.view(-1)


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
    shape, dtype = tuple(entry.size), entry.properties.state[0]
    found = {}
    for chunk in entry.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if 0 in sizes:
            continue
        values = _load(folder, places[name, offsets])
        if not isinstance(values, Stored) or values.dtype != dtype:
            raise UsageError(f"{folder}: {name} is no tensor of {dtype}")
        if values.shape != sizes and values.numel() == math.prod(sizes) == 1:
            values = Stored(sizes, dtype, values.read)
        within = len(offsets) == len(sizes) == len(shape) and all(
            first >= 0 and first + n <= most
            for first, n, most in zip(offsets, sizes, shape, strict=True)
        )
        if values.shape != sizes or not within:
            raise UsageError(f"{folder}: a chunk of {name} has another shape than {METADATA} says")
        found[offsets] = values
    chunks: _Chunks = tuple(sorted(found.items(), key=itemgetter(0)))
    in_rows = all(values.shape[1:] == shape[1:] for _, values in chunks)
    starts = [sum(offsets[:1]) * math.prod(shape[1:]) for offsets, _ in chunks]
    *ends, numel = accumulate((values.numel() for _, values in chunks), initial=0)
    if numel != math.prod(shape) or (in_rows and starts != ends):
        raise UsageError(f"{folder}: a chunk of {name} is missing, or there twice")
    if chunks and in_rows:
        return Stored.joined([values for _, values in chunks], shape)
    return Stored(shape, dtype, lambda start, end: _whole(shape, dtype, chunks)[start:end])


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
