"""DeepSpeed's checkpoints: reads those of stages 1, 2 and 3, and writes for stage 3.

    latest                                      the name of the newest folder
    global_stepN/
        mp_rank_00_model_states.pt              stages 1 and 2: the weights; at all stages counters
        zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3: the same of each rank, without weights
        [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    masters and optimizer state of a rank

A rank has the masters of several parameters in one flat tensor, and so for each kind of optimizer
state. At stages 1 and 2, each param group has one such tensor, which is divided over the ranks; at
stage 3, each parameter is divided over the ranks, and one or several tensors have its group's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint.files import CheckpointReader, Stored
from zero.checkpoint.folder import LATEST, MODEL_FILE, SCHEDULER, locate_deepspeed
from zero.checkpoint.models import ADAPTER_CONFIG, describe_adapters
from zero.conversion import full, ours, pickles
from zero.conversion.named import put_optimizer
from zero.conversion.training_state import Parameter, TrainingState
from zero.errors import UsageError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_FILE_OF_RANK = "zero_pp_rank_{}_" + MODEL_FILE
# What a file of the model has of its own (all else is the script's), and what is the same in all
# files that are written.
_FORMAT = json.loads(Path(__file__).with_name("deepspeed.json").read_text(encoding="utf-8"))


def recognizes(folder: Path) -> bool:
    return locate_deepspeed(folder, None) is not None


def read(folder: Path) -> TrainingState:
    """Return the state in a folder that `latest` is in, or in a checkpoint's own.

    Raises UsageError, which names the file, if it cannot be read, or is of a kind that is not
    taken over.
    """
    place = locate_deepspeed(folder, None)
    assert place is not None
    return _read(place, folder if folder != place else folder.parent)


def open_(place: Path) -> CheckpointReader:
    """Return a reader with which an engine loads the checkpoint in its own folder."""
    return ours.reader(_read(place, place.parent), place)


def _read(place: Path, beside: Path) -> TrainingState:
    """Return the state in a checkpoint's own folder, with the Trainer's files in `beside`."""
    if (place / "zero").is_dir():
        raise UsageError(
            f"{place} is in DeepSpeed's universal form: name the checkpoint that it was made of, "
            "which loads on any number of ranks"
        )
    try:
        return _state(_Shards(place), beside)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{place} is damaged, or its format has changed: {what}") from None


# -- the files

_NOT_TAKEN = "that is not taken over. Carry over the weights with DeepSpeed's zero_to_fp32.py"


class _Shards:
    """A checkpoint of which each rank has files of its own.

    A part is what one entry of `param_shapes` describes: a param group at stages 1 and 2, and a
    whole one or a range of its parameters at stage 3.

    Attributes:
        stage: ZeRO's stage.
        models: the contents of the files of the model, that of rank 0 first.
        optimizers: what each rank has of the optimizer.
        base: the state dict of rank 0's optimizer.
    """

    def __init__(self, place: Path):
        self.place = place
        names = _files_of_ranks(place)
        self.optimizers = [_load(place / name)["optimizer_state_dict"] for name in names]
        first = self.optimizers[0]
        if "fp32_flat_groups" in first:
            self.stage, model_files = 3, map(_MODEL_FILE_OF_RANK.format, range(len(names)))
            self._masters, self._base = "fp32_flat_groups", "optimizer_state_dict"
        else:
            # the stage is written as a member of an enumeration
            stage, model_files = first.get("zero_stage", 1), [MODEL_FILE]
            self.stage = stage.args[0] if isinstance(stage, pickles.Record) else stage
            self._masters, self._base = "single_partition_of_fp32_groups", "base_optimizer_state"
        self.models = [_load(place / name) for name in model_files]
        self.base = first[self._base]
        if isinstance(self.base, list):
            key = "zero_optimization.elastic_checkpoint"
            raise UsageError(f"{place} was saved with {key}; {_NOT_TAKEN}")
        self._starts: dict[str, int] = {}
        for shapes in self.models[0]["param_shapes"] if self.stage == 3 else ():
            sizes = (-(-math.prod(shape) // len(names)) for shape in shapes.values())
            self._starts |= zip(shapes, accumulate(sizes, initial=0), strict=False)
        self._require_one_step()

    def _of_part(self, part: int) -> list[dict[str, Any]]:
        """Return each rank's master, called "fp32", and optimizer state of a part."""
        return [
            {"fp32": each[self._masters][part]} | each[self._base]["state"].get(part, {})
            for each in self.optimizers
        ]

    def _require_one_step(self) -> None:
        """Raise UsageError if the files of some rank are of another save."""
        steps = [[model["global_steps"] for model in self.models]]
        for part in range(len(self.models[0]["param_shapes"])):
            of_ranks = [each["step"] for each in self._of_part(part) if "step" in each]
            steps.append(pickles.read_tensors(of_ranks))
        for of_ranks in steps:
            other = next((each for each in of_ranks if each != of_ranks[0]), None)
            if other is not None:
                what = f"some files are of step {int(of_ranks[0])} and others of step {int(other)}"
                raise UsageError(f"{self.place}: {what}; copy the checkpoint again")

    def _ranges(self, part: int, name: str, numel: int) -> list[slice]:
        """Return where a parameter is in each rank's tensors of a part."""
        if self.stage == 3:
            start = self._starts[name]
            return [slice(start, start + n) for n in _divided(numel, len(self.optimizers))]
        places = [each["param_slice_mappings"][part].get(name) for each in self.optimizers]
        return [slice(x.start, x.start + x.numel) if x is not None else slice(0) for x in places]

    def values(self, part: int, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return a parameter's optimizer state, and its master as "fp32"."""
        of_ranks, ranges = self._of_part(part), self._ranges(part, name, math.prod(shape))
        values, numel = of_ranks[0].copy(), of_ranks[0]["fp32"].numel()
        for key, value in values.items():
            # At stages 1 and 2, it has padding at the end of the last rank, unlike the master.
            if isinstance(value, Stored) and value.shape and value.numel() >= numel:
                pieces = [each[key][where] for each, where in zip(of_ranks, ranges, strict=True)]
                values[key] = _joined(pieces, shape, f"{self.place}: {key} of {name}")
        return values

    def frozen(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Return the weights of a frozen parameter at stage 3, which are in the files of the
        model.
        """
        counts = _divided(math.prod(shape), len(self.models))
        fragments = [each["frozen_param_fragments"][name] for each in self.models]
        pieces = [each[:count] for each, count in zip(fragments, counts, strict=True)]
        return _joined(pieces, shape, f"{self.place}: {name}")


def _files_of_ranks(place: Path) -> list[str]:
    """Return the name of each rank's file of the optimizer. Raises UsageError if one is missing, or
    if the run had more than data parallelism.
    """
    names = sorted(path.name for path in place.glob("*.pt"))
    for name in names:
        if name.startswith(("layer_", "expert_")) or re.search(r"mp_rank_0*[1-9]", name):
            what = "pipeline or tensor parallelism, or with experts of DeepSpeed"
            raise UsageError(f"{place / name} is of a run with {what}; {_NOT_TAKEN}")
    matches = filter(None, map(_OPTIMIZER_FILE.fullmatch, names))
    ranks = {int(match[1]): match[0] for match in matches}
    first = min(ranks)
    count = _load(place / ranks[first])["optimizer_state_dict"]["partition_count"]
    count = count[0] if isinstance(count, (list, tuple)) else count
    for rank in range(count):
        if rank not in ranks:
            name = ranks[first].replace(f"rank_{first}_", f"rank_{rank}_", 1)
            raise UsageError(f"{place / name} is missing")
    if len(ranks) != count:
        raise UsageError(f"{place} has files of {len(ranks)} ranks, and {count} saved it")
    return [ranks[rank] for rank in sorted(ranks)]


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{path} is missing")
    return pickles.load(path)


# -- tensors


def _joined(pieces: Sequence[Stored], shape: Sequence[int], what: str) -> Stored:
    """Return pieces that follow each other as one tensor.

    Raises UsageError, which begins with `what`, if they do not have its number of elements.
    """
    numel = sum(each.numel() for each in pieces)
    if numel != math.prod(shape) or len({each.dtype for each in pieces}) != 1:
        raise UsageError(
            f"{what} has {numel} elements, not {math.prod(shape)}. Either a file is damaged, or "
            "they were offloaded to NVMe, from where they are not taken over"
        )
    return Stored.joined(pieces, shape)


def _divided(numel: int, ranks: int) -> list[int]:
    """Return how many elements of a parameter each rank has at stage 3."""
    most = -(-numel // ranks)
    return [max(0, min(most, numel - rank * most)) for rank in range(ranks)]


# -- the state


def _state(files: _Shards, beside: Path) -> TrainingState:
    model = files.models[0]
    config = model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    size = model.get("mp_world_size")
    if isinstance(size, int) and size > 1:
        raise UsageError(f"{files.place} is of a run with tensor parallelism; {_NOT_TAKEN}")
    if config.get("zero_optimization", {}).get("mics_shard_size", -1) > 0:
        raise UsageError(f"{files.place} was saved with mics_shard_size; {_NOT_TAKEN}")
    version, ranks = model.get("ds_version", "of unknown version"), model["dp_world_size"]
    source = f"DeepSpeed {version}, stage {files.stage}, {ranks} ranks"
    state = TrainingState(source=source, ranks=ranks)
    _put_progress(state, model, config)
    _put_parameters(state, files)
    state.loss_scaler = _loss_scaler(files.optimizers[0].get("loss_scaler"))
    ours.put_files_of_trainer(state, beside)
    names = {path.name for path in state.beside}
    if "config.json" in names:
        state.model_config = json.loads((beside / "config.json").read_text())
    if ADAPTER_CONFIG in names:
        state.frozen_excluded = all(each.trainable for each in state.parameters.values())
        try:
            state.adapters = describe_adapters(full.model_of(beside))
        except UsageError as error:
            state.missing.append(f"what zero consolidate needs for PEFT's adapters: {error}")
        if SCHEDULER in names:
            # DeepSpeed removes param groups without parameters, such as the Trainer's second one of
            # adapters. zero does not, so the learning rates must come from the new schedule.
            schedule = pickles.load(beside / SCHEDULER)
            schedule = {key: schedule[key] for key in schedule.keys() - {"base_lrs", "_last_lr"}}
            state.changed[SCHEDULER] = pickles.without_records(schedule)
    return state


def _put_parameters(state: TrainingState, files: _Shards) -> None:
    model, module = files.models[0], files.models[0]["module"]
    shapes = model.get("frozen_param_shapes") or {}  # at stage 3, where `module` is empty
    part_of = {}
    for part, of_part in enumerate(model["param_shapes"]):
        shapes = shapes | of_part
        part_of |= dict.fromkeys(of_part, part)
    state.buffers = {name: module[name] for name in module if name in model["buffer_names"]}
    state.tied = model["shared_params"] or {}
    optimizer = {}
    for name in dict.fromkeys([*module, *part_of, *shapes]):
        if name in state.buffers or name in state.tied:
            continue
        dtype = module[name].dtype if name in module else torch.float32
        if name in part_of:
            optimizer[name] = files.values(part_of[name], name, tuple(shapes[name]))
            weights = optimizer[name].pop("fp32")
        elif files.stage < 3:
            weights = module[name]
        else:
            weights = files.frozen(name, tuple(shapes[name]))
        state.parameters[name] = Parameter(weights, dtype, trainable=name in part_of)
    state.frozen_excluded = files.stage > 1 and model.get("frozen_param_shapes") is None
    groups = []
    for group in files.base["param_groups"]:
        names = [name for name, part in part_of.items() if part in group["params"]]
        groups.append(group | {"params": names})
        for name in names if "step" in group else ():
            if optimizer[name]:
                optimizer[name].setdefault("step", group["step"])
    put_optimizer(state, optimizer, groups, str(files.place))


def _put_progress(state: TrainingState, model: dict[str, Any], config: dict[str, Any]) -> None:
    state.global_steps, state.skipped_steps = model["global_steps"], model["skipped_steps"]
    accumulation = config.get("gradient_accumulation_steps", 1)
    state.gradient_accumulation_steps = accumulation if isinstance(accumulation, int) else 1
    state.micro_steps = state.global_steps * state.gradient_accumulation_steps
    state.global_samples = model.get("global_samples", 0)
    if model["lr_scheduler"]:
        lacks = "{!r} of the learning-rate schedule"
        state.lr_scheduler = pickles.without_records(model["lr_scheduler"], state.missing, lacks)
    names = _FORMAT["names in a file of the model"]
    others = {key: value for key, value in model.items() if key not in names}
    lacks = "{!r} of your client_state"
    state.client_state = pickles.without_records(others, state.missing, lacks)
    for key in ("data_sampler", "random_ltd"):
        if model.get(key):
            state.missing.append(f"DeepSpeed's {key}")


# The state of zero's loss scaler, and of DeepSpeed's.
_SCALER = {
    "scale": "cur_scale",
    "steps": "cur_iter",
    "last_overflow": "last_overflow_iter",
    "overflows_left": "cur_hysteresis",
}


def _loss_scaler(found: Any) -> dict[str, Any] | None:
    """Return the state of zero's loss scaler, or None for a run without loss scaling."""
    values = found.state if isinstance(found, pickles.Record) else None
    if not isinstance(values, dict):
        return None
    if values.get("dynamic"):
        return {own: values[theirs] for own, theirs in _SCALER.items()}
    if values["cur_scale"] == 1:
        return None
    return {"scale": values["cur_scale"], "overflows_left": 1, "steps": 0, "last_overflow": -1}


# -- write

# Elements of a rank's flat tensor: `sub_group_size`, which DeepSpeed must have as well.
_SUB_GROUP_SIZE = 10**9


def write(state: TrainingState, out: Path) -> None:
    """Write what DeepSpeed 0.15 to 0.19 load at stage 3 on `state.ranks` ranks.

    Memory is needed for one rank's part of the masters and of the optimizer state.

    Raises OSError if the disk is full, and UsageError for state that DeepSpeed's form cannot hold.
    """
    if state.optimizer is None:
        raise UsageError(
            f"{state.source}: without optimizer state, DeepSpeed loads the model alone"
        )
    folder = out / f"global_step{state.global_steps}"
    folder.mkdir(parents=True)
    _fill(state)
    ranks = state.ranks
    parts = [part for index in range(len(state.groups)) for part in _parts(state, index, ranks)]
    for rank in range(ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        if any(each.dtype == torch.bfloat16 for each in state.parameters.values()):
            name = f"bf16_{name}"
        pickles.save(_optimizer_content(state, parts, rank, ranks), folder / name)
        name = _MODEL_FILE_OF_RANK.format(rank)
        pickles.save(_model_content(state, parts, rank, ranks), folder / name)
    (out / LATEST).write_text(folder.name)
    if _scaler(state).dynamic:
        what = (
            "loss_scale_window, hysteresis and min_loss_scale: DeepSpeed goes on with its defaults"
        )
        state.missing.append(what)
    ours.copy_beside(state, out)


def _fill(state: TrainingState) -> None:
    """Give parameters that have never had a gradient the state that DeepSpeed gives them: it counts
    their missing gradients as zeros.
    """
    trained = [each for each in state.parameters.values() if each.group is not None]
    complete = next((each.state for each in trained if each.state), {})
    for parameter in (each for each in trained if not each.state):
        for key, value in complete.items():
            if isinstance(value, Stored):
                shape, dtype = parameter.weights.shape, value.dtype
                parameter.state[key] = Stored(
                    shape,
                    dtype,
                    lambda start, end, dtype=dtype: torch.zeros(end - start, dtype=dtype),
                )
            else:
                parameter.state[key] = value


def _parts(state: TrainingState, group: int, ranks: int) -> Iterable[list[str]]:
    """Yield the names of the parameters that are in one flat tensor, as DeepSpeed divides them."""
    names, size = [], 0
    for name, each in state.parameters.items():
        if each.group == group:
            names.append(name)
            size += -(-each.weights.numel() // ranks)
            if size >= _SUB_GROUP_SIZE:
                yield names
                names, size = [], 0
    if names:
        yield names


def _optimizer_content(
    state: TrainingState, parts: Sequence[Sequence[str]], rank: int, ranks: int
) -> dict[str, Any]:
    masters, states = [], {}
    for index, names in enumerate(parts):
        of_part = [state.parameters[name] for name in names]
        masters.append(torch.cat([_of_rank(each.weights, rank, ranks).float() for each in of_part]))
        states[index] = {}
        for key, value in of_part[0].state.items():
            of_key: list[Any] = [each.state[key] for each in of_part]
            if isinstance(value, Stored):
                value = torch.cat([_of_rank(each, rank, ranks).float() for each in of_key])
            elif len(set(map(float, of_key))) > 1:
                raise UsageError(
                    f"{state.source}: {key!r} differs between {names[0]} and others of its param "
                    "group, and DeepSpeed has one for all of them"
                )
            states[index][key] = value
    scaler = _scaler(state)
    group_of = [state.parameters[names[0]].group for names in parts]
    groups = [
        options | {"params": [index for index, group in enumerate(group_of) if group == number]}
        for number, options in enumerate(state.groups)
    ]
    of_optimizer = _FORMAT["its state dict"] | {
        "loss_scaler": scaler,
        "dynamic_loss_scale": scaler.dynamic,
        "partition_count": ranks,
        "optimizer_state_dict": {"state": states, "param_groups": groups},
        "fp32_flat_groups": masters,
    }
    return _FORMAT["file of the optimizer"] | {"optimizer_state_dict": of_optimizer}


def _model_content(
    state: TrainingState, parts: Sequence[Sequence[str]], rank: int, ranks: int
) -> dict[str, Any]:
    frozen = {name: each for name, each in state.parameters.items() if each.group is None}
    module = {name: torch.empty(0, dtype=each.dtype) for name, each in state.parameters.items()}
    module |= {other: module[name] for other, name in state.tied.items()}
    module |= {name: each.tensor() for name, each in state.buffers.items()}
    accumulation = state.gradient_accumulation_steps or 1
    return (
        state.client_state
        | _FORMAT["file of the model"]
        | {
            "module": module,
            "buffer_names": list(state.buffers),
            "param_shapes": [
                {name: torch.Size(state.parameters[name].weights.shape) for name in names}
                for names in parts
            ],
            "frozen_param_shapes": {
                name: torch.Size(each.weights.shape) for name, each in frozen.items()
            },
            "frozen_param_fragments": {
                name: _of_rank(each.weights, rank, ranks).to(each.dtype)
                for name, each in frozen.items()
            },
            "shared_params": state.tied if rank == 0 else {},
            "lr_scheduler": state.lr_scheduler,
            "skipped_steps": state.skipped_steps,
            "global_steps": state.global_steps,
            "global_samples": state.global_samples,
            "dp_world_size": ranks,
            "ds_config": {"gradient_accumulation_steps": accumulation},
        }
    )


def _of_rank(values: Stored, rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's part of a tensor, with zeros at its end if it cannot be divided evenly."""
    most = -(-values.numel() // ranks)
    part = values[rank * most : (rank + 1) * most].values()
    return torch.nn.functional.pad(part, (0, most - part.numel()))


def _scaler(state: TrainingState) -> pickles.Record:
    found = state.loss_scaler
    if found is None or (found["steps"] == 0 < state.global_steps):  # a static scale counts nothing
        scale = 1.0 if found is None else found["scale"]
        return _of_deepspeed("LossScaler", cur_scale=scale, dynamic=False)
    # DeepSpeed takes the settings from here, and not from the configuration.
    counted = {theirs: found[own] for own, theirs in _SCALER.items()} | {"dtype": torch.float16}
    return _of_deepspeed("DynamicLossScaler", **counted, **_FORMAT["dynamic scaler"])


def _of_deepspeed(name: str, **values: Any) -> pickles.Record:
    kind = pickles.Global("deepspeed.runtime.fp16.loss_scaler", name)
    return pickles.Record(kind, (), values)
