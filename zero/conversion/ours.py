"""Checkpoints of zero: writes one from a `TrainingState`, reads one as a `TrainingState`, and lets
an engine load a `TrainingState` as if it were one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint import folder as folders
from zero.checkpoint.files import CheckpointReader, Slice, Stored
from zero.checkpoint.files import write as write_slices
from zero.checkpoint.folder import SCHEDULER, TRAINER_STATE
from zero.checkpoint.manifest import BLOCK, DATA_FILE, Manifest
from zero.checkpoint.models import open_at
from zero.checkpoint.state import Progress, describe_progress
from zero.checkpoint.values import decode, dtype_name, dtype_of, encode
from zero.conversion import pickles
from zero.conversion.training_state import Parameter, TrainingState
from zero.errors import UsageError

# Optimizers with the same state, so that each can take over that of the others.
ADAMS = "AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam"
FILES_OF_TRAINER = (
    "trainer_state.json scheduler.pt scaler.pt rng_state*.pth training_args.bin *token* *.jinja "
    "vocab* merges.txt *.model *config.json"
).split()


def put_files_of_trainer(state: TrainingState, folder: Path) -> None:
    """Have the files in the folder go along that belong to any kind of checkpoint, and say which
    are missing.
    """
    found = {path for pattern in FILES_OF_TRAINER for path in folder.glob(pattern)}
    # `trainer_state.json` is the last one: it says that a folder is complete
    state.beside = sorted(found, key=lambda path: (path.name == TRAINER_STATE, path.name))
    names = {path.name for path in state.beside}
    if not any(name.startswith("rng_state") for name in names):
        state.missing.append("random states: there is no rng_state*.pth")
    if TRAINER_STATE not in names:
        state.missing.append(f"data position: there is no {TRAINER_STATE}")
    if SCHEDULER not in names and state.lr_scheduler is None:
        state.missing.append(NO_SCHEDULE)


NO_SCHEDULE = f"learning-rate schedule: there is no {SCHEDULER}"

# -- write


def write(state: TrainingState, out: Path) -> Path:
    """Write a checkpoint to `out/global_stepN`, with the Trainer's files beside it, and return its
    folder. Other ranks are not needed.

    Raises OSError if the disk is full, and UsageError for values that cannot be stored.
    """
    tag, description = f"global_step{state.global_steps}", describe(state)
    slices = [Slice(key, each.numel(), 0, each[:]) for key, each in to_store(state).items()]
    folder = folders.begin(out, tag, sum(each.values.nbytes for each in slices))
    try:
        written = write_slices(slices, folder, DATA_FILE.format(0))
        description["files"] = {written["name"]: written["file"]}
        description["tensors"] = written["tensors"]
        folders.commit(folder, tag, description, latest=True)
    except BaseException:
        folders.abandon(folder)
        raise
    copy_beside(state, out)
    return out / tag


def copy_beside(state: TrainingState, out: Path) -> None:
    for path in state.beside:
        if path.name in state.changed:
            pickles.save(state.changed[path.name], out / path.name)
        else:
            shutil.copyfile(path, out / path.name)


def to_store(state: TrainingState) -> dict[str, Stored]:
    """Return everything that a checkpoint has in files, by its key."""
    values = {f"plain/{name}": value for name, value in state.buffers.items()}
    for name, parameter in state.parameters.items():
        values[f"weights/{name}"] = parameter.weights
        for key, value in parameter.state.items():
            if isinstance(value, Stored):
                values[f"optimizer/{key}/{name}"] = value
    return values


def describe(state: TrainingState) -> dict[str, Any]:
    """Return the content of `checkpoint.json`, without what is known when the files are written."""
    return describe_progress(state, state.buffers) | {
        "tag": f"global_step{state.global_steps}",
        # No rank wrote it, so its random states belong to none.
        "world_size": 0,
        "random_states": [],
        "stage": 3,
        "frozen_excluded": state.frozen_excluded,
        "parameters": {
            name: {
                "shape": list(each.weights.shape),
                "dtype": dtype_name(each.dtype),
                "trainable": each.trainable,
                "group": each.group,
            }
            for name, each in state.parameters.items()
        },
        "tied": state.tied,
        "optimizer": None if state.optimizer is None else _describe_optimizer(state),
        "hf_config": state.model_config,
        "adapters": state.adapters,
    }


def _describe_optimizer(state: TrainingState) -> dict[str, Any]:
    kinds: dict[str, dict] = {}
    for name, parameter in state.parameters.items():
        for key, value in parameter.state.items():
            kind = kinds.setdefault(key, {})
            if isinstance(value, Stored):  # of the parameter's shape
                kind["dtype"] = dtype_name(value.dtype)
            else:
                place = f"optimizer state {key!r} of {name}"
                kind.setdefault("numbers", {})[name] = encode(value, place)
    classes = [str(state.optimizer)]
    if state.optimizer in ADAMS:
        classes += [name for name in ADAMS if name != state.optimizer]
    groups = [encode(each, f"param_groups[{index}]") for index, each in enumerate(state.groups)]
    return {"classes": classes, "groups": groups, "state": kinds}


# -- load without a copy on disk


class _Reader(CheckpointReader):
    """Reads the values of a `TrainingState` where an engine reads a checkpoint of ours."""

    def __init__(self, folder: Path, manifest: Manifest, values: dict[str, Stored]):
        super().__init__(folder, manifest)
        self._values = values

    def read(self, slices: Sequence[Slice]) -> None:
        for each in slices:
            self.check(each.key, each.numel)
            if not each.numel:  # it is in no file
                continue
            stored, first = self._values[each.key], each.start
            for part in each.values.split(BLOCK):
                part.copy_(stored.read(first, first + part.numel()))
                first += part.numel()


def reader(state: TrainingState, folder: Path) -> CheckpointReader:
    """Return a reader with which an engine loads the state. `folder` is named in errors."""
    description, values = describe(state), to_store(state)
    for number, (key, each) in enumerate(values.items()):
        if numel := each.numel():
            name, nbytes = DATA_FILE.format(number), each.nbytes  # as if it had a file of its own
            description["files"][name] = {"bytes": nbytes, "sums": [""] * -(-nbytes // BLOCK)}
            entry = {"dtype": dtype_name(each.dtype), "slices": [[0, numel, name, 0]]}
            description["tensors"][key] = entry | {"numel": numel}
    return _Reader(folder, Manifest.model_validate(description), values)


# -- read


def read(folder: Path) -> TrainingState:
    """Return the state in a checkpoint of ours.

    Raises ValueError if there is none. Reading a tensor raises it if a file is damaged.
    """
    source = open_at(folder)
    manifest = source.manifest
    if manifest.base:
        raise UsageError(f"{folder}: its quantized base is not in the checkpoint")

    def stored(key: str, shape: Sequence[int], own: str | None) -> Stored:
        numel = torch.Size(shape).numel()
        dtype = source.dtype(key) if numel else dtype_of(str(own))  # one without elements has none

        def read(start: int, end: int) -> torch.Tensor:
            values = torch.empty(end - start, dtype=dtype, device="cpu")
            source.read([Slice(key, numel, start, values)])
            return values

        return Stored(tuple(shape), dtype, read)

    parameters = {}
    for name, value in manifest.parameters.items():
        parameters[name] = Parameter(
            stored(f"weights/{name}", value.shape, value.dtype),
            dtype_of(value.dtype),
            value.trainable,
            value.group,
        )
    optimizer = manifest.optimizer
    for key, kind in optimizer.state.items() if optimizer else ():
        if kind.whole:
            raise UsageError(
                f"{folder}: the optimizer keeps {key!r} as a whole, which other formats do not have"
            )
        for name, parameter in parameters.items():
            place, shape = f"optimizer/{key}/{name}", parameter.weights.shape
            is_empty = parameter.group is not None and not parameter.weights.numel()
            if source.holds(place) or (kind.dtype is not None and is_empty):
                parameter.state[key] = stored(place, shape, kind.dtype)
            elif kind.numbers and name in kind.numbers:
                parameter.state[key] = decode(kind.numbers[name])
    state = TrainingState(
        **vars(Progress.of(manifest)),
        source=f"zero, saved by {manifest.world_size} rank(s)" if manifest.world_size else "zero",
        parameters=parameters,
        buffers={
            name: stored(f"plain/{name}", value.shape, value.dtype)
            for name, value in manifest.plain.items()
        },
        tied=manifest.tied,
        optimizer=optimizer and optimizer.classes[0],
        groups=decode(optimizer.groups) if optimizer else [],
        ranks=max(manifest.world_size, 1),  # none, if `zero adopt` wrote it
        frozen_excluded=manifest.frozen_excluded,
        model_config=manifest.hf_config,
        adapters={name: each.model_dump() for name, each in manifest.adapters.items()},
    )
    is_own = folders.locate(folder, None) == folder
    put_files_of_trainer(state, folder.parent if is_own else folder)
    return state
