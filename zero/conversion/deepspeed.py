"""DeepSpeed's checkpoints: reads those of stages 1, 2 and 3 and the universal form, and writes for
stage 3.

    latest                                      the name of the newest folder
    global_stepN/
        mp_rank_00_model_states.pt              stages 1 and 2: the weights; at all stages counters
        zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3: the same of each rank, without weights
        [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    masters and optimizer state of a rank
    global_stepN_universal/                     `ds_to_universal.py` makes it
        zero/NAME/fp32.pt, exp_avg.pt, ...      whole tensors
        zero/optimizer_state.pt                 the options of the param groups

A rank has the masters of several parameters in one flat tensor, and so for each kind of optimizer
state. At stages 1 and 2, each param group has one such tensor, which is divided over the ranks; at
stage 3, each parameter is divided over the ranks, and one or several tensors have its group's."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint.adapters import ADAPTER_CONFIG, describe_adapters
from zero.checkpoint.files import CheckpointReader
from zero.checkpoint.folder import LATEST, locate_deepspeed
from zero.checkpoint.resumable import SCHEDULER
from zero.checkpoint.state import NOT_STORED
from zero.conversion import full, ours, pickles
from zero.conversion.named import optimizer_of
from zero.conversion.training_state import Number, Parameter, Stored, TrainingState
from zero.errors import UsageError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_FILE = "mp_rank_00_model_states.pt"
_MODEL_FILE_OF_RANK = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
# What a file of the model has of its own. All else is the script's.
_KNOWN = set(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params "
    "frozen_param_fragments lr_scheduler data_sampler random_ltd skipped_steps global_steps "
    "global_samples dp_world_size mp_world_size ds_config ds_version num_experts "
    "checkpoint_parallel_dimensions universal_checkpoint_info".split()
)


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
    try:
        shards = _Universal(place) if (place / "zero").is_dir() else _shards(place)
        if not isinstance(shards, _Universal):
            _require_one_step(shards)
        return _state(shards, place, beside)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{place} is damaged, or its format has changed: {what}") from None


# -- the files


class _Shards:
    """The files of a checkpoint.

    A part is what one entry of `param_shapes` describes: a param group at stages 1 and 2, and a
    whole one or a range of its parameters at stage 3.

    Attributes:
        stage: ZeRO's stage.
        model: the content of rank 0's file of the model.
        models: the contents of all of them.
        optimizers: what each rank has of the optimizer.
        base: the state dict of rank 0's optimizer, whose "state" has an entry for each part.
    """

    stage: int

    def __init__(self, place: Path, models: list[dict], optimizers: list[dict], base: dict):
        self.place, self.models, self.optimizers, self.base = place, models, optimizers, base
        self.model = models[0]

    def keys(self, part: int, name: str) -> dict[str, Number | None]:
        """Return the names of a part's state, with the values of those that are numbers."""
        numel = self.masters(part)[0].numel()

        def is_flat(value: Any) -> bool:
            # At stages 1 and 2, it has padding at the end of the last rank, unlike the master.
            return isinstance(value, Stored) and value.shape != () and value.numel() >= numel

        found = self.state(0, part)
        return {key: None if is_flat(each) else _number(each) for key, each in found.items()}

    def masters(self, part: int) -> list[Stored]:
        """Return each rank's masters of a part."""
        raise NotImplementedError

    def state(self, rank: int, part: int) -> dict[str, Any]:
        """Return a rank's optimizer state of a part."""
        raise NotImplementedError

    def places(self, part: int, name: str, numel: int) -> list[slice]:
        """Return where a parameter is in each rank's tensors of a part."""
        raise NotImplementedError

    def tensor(self, part: int, name: str, shape: tuple[int, ...], key: str | None) -> Stored:
        """Return the master of a parameter, or its optimizer state `key`."""
        masters = self.masters(part)
        whole = [
            master if key is None else self.state(rank, part)[key]
            for rank, master in enumerate(masters)
        ]
        places = self.places(part, name, math.prod(shape))
        pieces = [each[place] for each, place in zip(whole, places, strict=True)]
        return joined(pieces, shape, f"{self.place}: {key or 'the master'} of {name}")


class _Stage3(_Shards):
    stage = 3

    def __init__(self, place: Path, models: list[dict], optimizers: list[dict], base: dict):
        super().__init__(place, models, optimizers, base)
        self._starts: dict[str, int] = {}
        for shapes in self.model["param_shapes"]:
            sizes = (-(-math.prod(shape) // len(optimizers)) for shape in shapes.values())
            self._starts |= zip(shapes, accumulate(sizes, initial=0), strict=False)

    def masters(self, part: int) -> list[Stored]:
        return [each["fp32_flat_groups"][part] for each in self.optimizers]

    def state(self, rank: int, part: int) -> dict[str, Any]:
        return self.optimizers[rank]["optimizer_state_dict"]["state"].get(part, {})

    def places(self, part: int, name: str, numel: int) -> list[slice]:
        start = self._starts[name]
        return [slice(start, start + n) for n in _divided(numel, len(self.optimizers))]


class _Stage2(_Shards):
    """Stages 1 and 2."""

    def __init__(self, place: Path, models: list[dict], optimizers: list[dict], base: dict):
        super().__init__(place, models, optimizers, base)
        # the stage is written as a member of an enumeration
        stage = optimizers[0].get("zero_stage", 1)
        self.stage = stage.args[0] if isinstance(stage, pickles.Record) else stage

    def masters(self, part: int) -> list[Stored]:
        return [each["single_partition_of_fp32_groups"][part] for each in self.optimizers]

    def state(self, rank: int, part: int) -> dict[str, Any]:
        return self.optimizers[rank]["base_optimizer_state"]["state"].get(part, {})

    def places(self, part: int, name: str, numel: int) -> list[slice]:
        found = []
        for each in self.optimizers:
            place = each["param_slice_mappings"][part].get(name)
            start, count = (0, 0) if place is None else (place.start, place.numel)
            found.append(slice(start, start + count))
        return found


class _Universal(_Shards):
    """The universal form, which has whole tensors."""

    def __init__(self, place: Path):
        names = [_MODEL_FILE, _MODEL_FILE_OF_RANK.format(0)]
        file = next((place / name for name in names if (place / name).is_file()), place / names[0])
        optimizer = _load(place / "zero" / "optimizer_state.pt")
        base = optimizer.get("optimizer_state_dict") or {"state": {}}
        base = base | {"param_groups": optimizer["param_groups"]}
        super().__init__(place, [_load(file)], [optimizer], base)
        self.stage = 3 if file.name == names[1] else 2

    def keys(self, part: int, name: str) -> dict[str, Number | None]:
        found: dict[str, Number | None] = {
            key: _number(value)
            for key, value in self.base["state"].get(part, {}).items()
            if not isinstance(value, Stored) or value.numel() == 1
        }
        for path in sorted(self._folder(name).glob("*.pt")):
            if path.stem == "step":
                found["step"] = _number(_load(path))
            elif path.stem != "fp32":
                found[path.stem] = None
        return found

    def tensor(self, part: int, name: str, shape: tuple[int, ...], key: str | None) -> Stored:
        path = self._folder(name) / f"{key or 'fp32'}.pt"
        content: Any = _load(path)
        if isinstance(content, Stored):  # of stage 3
            return joined([content], shape, str(path))
        if content.get("cat_dim") or content.get("vocab_tensor"):
            raise UsageError(f"{path}: it is of a run with tensor parallelism; {_NOT_TAKEN}")
        return joined([content["param"]], shape, str(path))

    def _folder(self, name: str) -> Path:
        if Path(name).name != name:
            raise UsageError(f"{self.place}: a parameter has the name {name!r}")
        return self.place / "zero" / name


_NOT_TAKEN = "that is not taken over. Carry over the weights with DeepSpeed's zero_to_fp32.py"


def _shards(place: Path) -> _Shards:
    names = [path.name for path in place.glob("*.pt")]
    ranks = {
        int(match[1]): match[0] for name in names if (match := _OPTIMIZER_FILE.fullmatch(name))
    }
    others = [
        name
        for name in names
        if name.startswith(("layer_", "expert_")) or re.search(r"mp_rank_0*[1-9]", name)
    ]
    if others:
        what = "pipeline or tensor parallelism, or with experts of DeepSpeed"
        raise UsageError(f"{place / sorted(others)[0]} is of a run with {what}; {_NOT_TAKEN}")
    missing = next((rank for rank in range(max(ranks) + 1) if rank not in ranks), None)
    if missing is None and len(ranks) != _count(place, ranks[0]):
        missing = len(ranks)
    if missing is not None:
        name = ranks[max(ranks)].replace(f"rank_{max(ranks)}_", f"rank_{missing}_", 1)
        raise UsageError(f"{place / name} is missing")
    optimizers = [_load(place / ranks[rank])["optimizer_state_dict"] for rank in sorted(ranks)]
    if "fp32_flat_groups" in optimizers[0]:
        models = [_load(place / _MODEL_FILE_OF_RANK.format(rank)) for rank in sorted(ranks)]
        return _Stage3(place, models, optimizers, optimizers[0]["optimizer_state_dict"])
    base = optimizers[0]["base_optimizer_state"]
    if isinstance(base, list):
        key = "zero_optimization.elastic_checkpoint"
        raise UsageError(f"{place} was saved with {key}; {_NOT_TAKEN}")
    return _Stage2(place, [_load(place / _MODEL_FILE)], optimizers, base)


def _require_one_step(shards: _Shards) -> None:
    """Raise UsageError if the files of some rank are of another save."""
    steps = [[model["global_steps"] for model in shards.models]]
    for part in range(len(shards.model["param_shapes"])):
        states = (shards.state(rank, part) for rank in range(len(shards.optimizers)))
        steps.append([_number(state["step"]) for state in states if "step" in state])
    for of_ranks in steps:
        other = next((each for each in of_ranks if each != of_ranks[0]), None)
        if other is not None:
            what = f"some files are of step {int(of_ranks[0])} and others of step {int(other)}"
            raise UsageError(f"{shards.place}: {what}; copy the checkpoint again")


def _count(place: Path, name: str) -> int:
    """Return the number of ranks that saved the checkpoint."""
    count = _load(place / name)["optimizer_state_dict"]["partition_count"]
    return count[0] if isinstance(count, (list, tuple)) else count


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{path} is missing")
    return pickles.load(path)


# -- tensors


def joined(pieces: Sequence[Stored], shape: Sequence[int], what: str) -> Stored:
    """Return pieces that follow each other as one tensor.

    Raises UsageError, which begins with `what`, if they do not have its number of elements.
    """
    starts = list(accumulate((each.numel() for each in pieces), initial=0))
    if starts[-1] != math.prod(shape) or len({each.dtype for each in pieces}) != 1:
        raise UsageError(
            f"{what} has {starts[-1]} elements, not {math.prod(shape)}. Either a file is damaged, "
            "or they were offloaded to NVMe, from where they are not taken over"
        )

    def read(start: int, end: int) -> torch.Tensor:
        found = []
        for index in range(bisect_right(starts, start) - 1, len(pieces)):
            first = starts[index]
            if first >= end:
                break
            most = pieces[index].numel()
            found.append(pieces[index].read(max(start - first, 0), min(end - first, most)))
        return torch.cat(found) if found else torch.empty(0, dtype=pieces[0].dtype)

    return Stored(tuple(shape), pieces[0].dtype, read)


def _divided(numel: int, ranks: int) -> list[int]:
    """Return how many elements of a parameter each rank has at stage 3."""
    most = -(-numel // ranks)
    return [max(0, min(most, numel - rank * most)) for rank in range(ranks)]


def _number(value: Any) -> Number:
    return value.tensor() if isinstance(value, Stored) else value


# -- the state


def _state(shards: _Shards, place: Path, beside: Path) -> TrainingState:
    model = shards.model
    config = model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    if any(isinstance(value, int) and value > 1 for value in (model.get("mp_world_size"),)):
        raise UsageError(f"{place} is of a run with tensor parallelism; {_NOT_TAKEN}")
    if config.get("zero_optimization", {}).get("mics_shard_size", -1) > 0:
        raise UsageError(f"{place} was saved with mics_shard_size; {_NOT_TAKEN}")
    version, ranks = model.get("ds_version", "of unknown version"), model["dp_world_size"]
    source = f"DeepSpeed {version}, stage {shards.stage}, {ranks} ranks"
    state = TrainingState(source, {}, ranks=ranks)
    if isinstance(shards, _Universal):
        state.source = f"DeepSpeed {version}, universal, of {ranks} ranks"
    _put_parameters(state, shards)
    _put_progress(state, model, config)
    state.loss_scaler = _loss_scaler(shards.optimizers[0].get("loss_scaler"))
    state.beside = ours.files_of_trainer(beside)
    names = {path.name for path in state.beside}
    if "config.json" in names:
        state.model_config = json.loads((beside / "config.json").read_text())
    if ADAPTER_CONFIG in names:
        state.frozen_excluded = all(each.trainable for each in state.parameters.values())
        try:
            state.adapters = describe_adapters(full.skeleton(beside))
        except UsageError as error:
            state.missing.append(f"what zero consolidate needs for PEFT's adapters: {error}")
        if SCHEDULER in names:
            # DeepSpeed removes param groups without parameters, such as the Trainer's second one of
            # adapters. zero does not, so the learning rates must come from the new schedule.
            schedule = pickles.load(beside / SCHEDULER)
            schedule = {key: schedule[key] for key in schedule.keys() - {"base_lrs", "_last_lr"}}
            state.changed[SCHEDULER], _ = pickles.without_records(schedule)
    if not any(name.startswith("rng_state") for name in names):
        state.missing.append("random states: DeepSpeed saves none")
    if "trainer_state.json" not in names:
        state.missing.append("data position: there is no trainer_state.json")
    if state.lr_scheduler is None and SCHEDULER not in names:
        state.missing.append("learning-rate schedule: the run had none")
    return state


def _put_parameters(state: TrainingState, shards: _Shards) -> None:
    model, module = shards.model, shards.model["module"]
    buffers, tied = set(model["buffer_names"]), model["shared_params"] or {}
    part_of = {name: part for part, each in enumerate(model["param_shapes"]) for name in each}
    state.buffers = {name: module[name] for name in module if name in buffers}
    by_stage_3 = model.get("frozen_param_shapes") or {}
    known = buffers | tied.keys()
    names = [name for name in [*module, *part_of, *by_stage_3] if name not in known]
    for name in dict.fromkeys(names):
        dtype = module[name].dtype if name in module else torch.float32
        if name in part_of:
            parameter = _trained(shards, part_of[name], name, dtype)
        elif shards.stage < 3:
            parameter = Parameter(module[name], dtype, trainable=False)
        else:
            weights = _frozen(shards, name, tuple(by_stage_3[name]))
            parameter = Parameter(weights, dtype, trainable=False)
        parameter.tied = [other for other, first in tied.items() if first == name]
        state.parameters[name] = parameter
    state.frozen_excluded = shards.stage > 1 and model.get("frozen_param_shapes") is None
    state.optimizer = optimizer_of(state)
    for group in shards.base["param_groups"]:
        options = {key: value for key, value in group.items() if key not in NOT_STORED | {"step"}}
        kept, left_out = pickles.without_records(options)
        state.groups.append(kept)
        state.missing += [f"the option {name!r} of the optimizer" for name in left_out]


def _trained(shards: _Shards, part: int, name: str, dtype: torch.dtype) -> Parameter:
    shape = tuple(shards.model["param_shapes"][part][name])
    groups = shards.base["param_groups"]
    index = next((i for i, group in enumerate(groups) if part in group["params"]), None)
    if index is None:
        raise UsageError(f"{shards.place}: no param group has {name}")
    parameter = Parameter(shards.tensor(part, name, shape, None), dtype, group=index)
    for key, value in shards.keys(part, name).items():
        tensor = shards.tensor(part, name, shape, key) if value is None else value
        parameter.state[key] = tensor
    if parameter.state and "step" in groups[index]:
        parameter.state.setdefault("step", groups[index]["step"])
    return parameter


def _frozen(shards: _Shards, name: str, shape: tuple[int, ...]) -> Stored:
    """Return the weights of a frozen parameter at stage 3, which are in the files of the model."""
    counts = _divided(math.prod(shape), len(shards.models))
    if isinstance(shards, _Universal):
        what = f"{shards.place}: the universal form has no weights of the frozen {name}"
        raise UsageError(f"{what}; name the folder that it was made of")
    fragments = [each["frozen_param_fragments"][name] for each in shards.models]
    pieces = [each[:count] for each, count in zip(fragments, counts, strict=True)]
    return joined(pieces, shape, f"{shards.place}: {name}")


def _put_progress(state: TrainingState, model: dict[str, Any], config: dict[str, Any]) -> None:
    state.global_steps, state.skipped_steps = model["global_steps"], model["skipped_steps"]
    accumulation = config.get("gradient_accumulation_steps", 1)
    accumulation = accumulation if isinstance(accumulation, int) else 1
    state.micro_steps = state.global_steps * accumulation
    state.global_samples = model.get("global_samples", 0)
    if model["lr_scheduler"]:
        state.lr_scheduler, left_out = pickles.without_records(model["lr_scheduler"])
        state.missing += [f"{name!r} of the learning-rate schedule" for name in left_out]
    others = {key: value for key, value in model.items() if key not in _KNOWN}
    state.client_state, left_out = pickles.without_records(others)
    state.missing += [f"{name!r} of your client_state" for name in left_out]
    for key in ("data_sampler", "random_ltd"):
        if model.get(key):
            state.missing.append(f"DeepSpeed's {key}")


def _loss_scaler(found: Any) -> dict[str, Any] | None:
    """Return the state of zero's loss scaler, or None for a run without loss scaling."""
    values = found.state if isinstance(found, pickles.Record) else None
    if not isinstance(values, dict):
        return None
    if values.get("dynamic"):
        names = {"overflows_left": "cur_hysteresis", "steps": "cur_iter"}
        names |= {"scale": "cur_scale", "last_overflow": "last_overflow_iter"}
        return {ours_: values[theirs] for ours_, theirs in names.items()}
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
    return {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "loss_scaler": scaler,
            "dynamic_loss_scale": scaler.dynamic,
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "fp32_flat_groups": masters,
        },
        "ds_config": {},
        "ds_version": "0.19.8",
    }


def _model_content(
    state: TrainingState, parts: Sequence[Sequence[str]], rank: int, ranks: int
) -> dict[str, Any]:
    module: dict[str, torch.Tensor] = {}
    frozen = {name: each for name, each in state.parameters.items() if each.group is None}
    for name, each in state.parameters.items():
        module |= dict.fromkeys([name, *each.tied], torch.empty(0, dtype=each.dtype))
    module |= {name: each.tensor() for name, each in state.buffers.items()}
    tied = {other: name for name, each in state.parameters.items() for other in each.tied}
    accumulation = state.micro_steps // state.global_steps if state.global_steps else 1
    return state.client_state | {
        "module": module,
        "buffer_names": list(state.buffers),
        "optimizer": None,
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
        "shared_params": tied if rank == 0 else {},
        "lr_scheduler": state.lr_scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": state.skipped_steps,
        "global_steps": state.global_steps,
        "global_samples": state.global_samples,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"gradient_accumulation_steps": accumulation},
        "ds_version": "0.19.8",
    }


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
    return _of_deepspeed(
        "DynamicLossScaler",
        cur_scale=found["scale"],
        cur_iter=found["steps"],
        last_overflow_iter=found["last_overflow"],
        cur_hysteresis=found["overflows_left"],
        scale_window=1000,
        min_scale=1,
        delayed_shift=2,
        scale_factor=2.0,
        consecutive_hysteresis=False,
        dtype=torch.float16,
        raise_error_at_min_scale=True,
        dynamic=True,
    )


def _of_deepspeed(name: str, **values: Any) -> pickles.Record:
    kind = pickles.Global("deepspeed.runtime.fp16.loss_scaler", name)
    return pickles.Record(kind, (), values)
