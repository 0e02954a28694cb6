"""Makes a `TrainingState` of tensors and optimizer state that have names, and the reverse: what the
formats of torch, the Trainer and DeepSpeed share."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.checkpoint.export import on_disk
from zero.checkpoint.files import Stored
from zero.checkpoint.folder import SCHEDULER, TRAINER_STATE
from zero.checkpoint.models import describe_adapters
from zero.checkpoint.state import NOT_STORED, model_config, tied_names
from zero.conversion import pickles
from zero.conversion.ours import NO_SCHEDULE, put_files_of_trainer, to_store
from zero.conversion.training_state import Number, Parameter, TrainingState
from zero.errors import UsageError

# Optimizers are recognized by what they keep for a parameter.
_OPTIMIZERS = {
    frozenset({"step", "exp_avg", "exp_avg_sq"}): "AdamW",
    frozenset({"momentum_buffer"}): "SGD",
    frozenset({"exp_avg"}): "Lion",
}


def named_state(
    source: str,
    file: Path,
    weights: Mapping[str, Stored],
    optimizer: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    model: nn.Module | None,
) -> TrainingState:
    """Return the state of a model, with what the Trainer's files beside it say.

    Args:
        source: what it is read from, for people.
        file: the file or folder of the weights, which errors name.
        optimizer: the state of each parameter, by its name.
        groups: the param groups; "params" are names.
        model: the model without values. Without it, what the optimizer does not have must be a tied
            weight or a buffer that is no floating-point tensor.
    """
    state = TrainingState(source=source)
    if model is None:
        trained = {name for group in groups for name in group["params"]}
        _put_weights(state, weights, trained, file)
    else:
        _put_weights_of(state, weights, model, file)
    _put_progress(state, file if file.is_dir() else file.parent)
    put_optimizer(state, optimizer, groups, str(file))
    return state


def put_optimizer(
    state: TrainingState,
    optimizer: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    place: str,
) -> None:
    """Put the optimizer's state and its param groups into the state (see `named_state`), which has
    the parameters and the number of steps already, or 0 if that is unknown. Errors begin with
    `place`.
    """
    for index, group in enumerate(groups):
        for name in group["params"]:
            if name not in state.parameters:
                raise UsageError(f"{place}: it lacks {name}, which the optimizer trains")
            parameter = state.parameters[name]
            parameter.group = index
            parameter.state = {
                key: _state_value(key, value, parameter, f"{place}: {key!r} of {name}")
                for key, value in optimizer.get(name, {}).items()
                if value is not None
            }
        options = {key: each for key, each in group.items() if key not in NOT_STORED | {"step"}}
        lacks = "the option {!r} of the optimizer"
        state.groups.append(pickles.without_records(options, state.missing, lacks))
    kinds = {frozenset(each.state) for each in state.parameters.values() if each.state}
    if len(kinds) > 1 or not kinds <= _OPTIMIZERS.keys():
        found = " or ".join(str(sorted(each)) for each in kinds)
        raise UsageError(
            f"{state.source}: an optimizer that keeps {found} for a parameter is not taken over; "
            "AdamW, SGD with momentum and Lion are"
        )
    state.optimizer = _OPTIMIZERS[kinds.pop()] if kinds else "SGD"
    counts: list[Any] = [each.state.get("step", 0) for each in state.parameters.values()]
    taken = int(max(map(float, counts), default=0))
    state.global_steps = state.global_steps or taken
    if taken > state.global_steps:
        raise UsageError(
            f"{place}: the optimizer's state is of step {taken}, and the rest of the checkpoint of "
            f"step {state.global_steps}: copy the checkpoint again"
        )


def _put_weights_of(
    state: TrainingState, weights: Mapping[str, Stored], model: nn.Module, file: Path
) -> None:
    """Put what `model` has into the state."""
    state.adapters = describe_adapters(model)
    state.frozen_excluded = bool(state.adapters)
    state.model_config = None if state.adapters else model_config(model)
    for described in state.adapters.values():
        model_names = {name: own for name, own in described["tensors"].items() if own}
        weights = {model_names.get(name, name): value for name, value in weights.items()}
    state.tied = tied_names(model)
    for name, param in model.named_parameters():
        names = [name, *(other for other, first in state.tied.items() if first == name)]
        found = next((weights[each] for each in names if each in weights), None)
        if found is None and state.adapters and not param.requires_grad:
            continue
        if found is None or found.shape != tuple(param.shape):
            what = "is missing" if found is None else f"has the shape {list(found.shape)}"
            raise UsageError(
                f"{file}: {name} {what}, and the model of config.json has it with the shape "
                f"{list(param.shape)}. transformers renames or splits the weights of some models "
                "when it saves them; these are not taken over"
            )
        state.parameters[name] = Parameter(found, found.dtype, param.requires_grad)
    persistent = model.state_dict(keep_vars=True).keys()
    names = [name for name, _ in model.named_buffers() if name in persistent]
    state.buffers = {name: weights[name] for name in names if name in weights}


def _put_weights(
    state: TrainingState, weights: Mapping[str, Stored], trained: Collection[str], file: Path
) -> None:
    """Put all weights into the state, without a model that says what they are."""
    for name in weights:
        if name in trained:
            state.parameters[name] = Parameter(weights[name], weights[name].dtype)
    for name, value in weights.items():
        if name in trained:
            continue
        same = (
            first
            for first, parameter in state.parameters.items()
            if parameter.weights.shape == value.shape
            and torch.equal(parameter.weights.values(), value.values())
        )
        if (first := next(same, None)) is not None:
            state.tied[name] = first
        elif not value.dtype.is_floating_point:
            state.buffers[name] = value
        else:
            raise UsageError(
                f"{file}: the optimizer does not have {name}, and nothing says whether it is a "
                "frozen parameter or a buffer; put the model's config.json into the folder"
            )


def _state_value(key: str, value: Any, parameter: Parameter, place: str) -> Stored | Number:
    if isinstance(value, Stored):
        if value.shape == parameter.weights.shape and key != "step":
            return value
        value = value.tensor() if value.numel() == 1 else value
    if isinstance(value, (bool, int, float, torch.Tensor)):
        return value
    raise UsageError(f"{place}: neither a number nor a tensor of the parameter's shape")


# -- the Trainer's files


def _put_progress(state: TrainingState, folder: Path) -> None:
    """Put what the Trainer's files in the folder say into the state, and what they lack."""
    if (folder / SCHEDULER).is_file():
        scheduler = pickles.load(folder / SCHEDULER)
        if not isinstance(scheduler, dict) or not isinstance(scheduler.get("last_epoch"), int):
            raise UsageError(f"{folder / SCHEDULER}: it has no `last_epoch` of a scheduler")
        kept = pickles.without_records(scheduler)
        # a schedule of the configuration's section `scheduler` counts from -1
        state.lr_scheduler = kept | {"last_batch_iteration": scheduler["last_epoch"] - 1}
    put_files_of_trainer(state, folder)
    path = folder / TRAINER_STATE
    if path.is_file():
        try:
            state.global_steps = int(json.loads(path.read_text())["global_step"])
        except (LookupError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is damaged: {error}") from None
    if (folder / "scaler.pt").is_file():
        scaler = pickles.load(folder / "scaler.pt")
        steps = int(scaler["_growth_tracker"])
        counted = {"overflows_left": 1, "steps": steps, "last_overflow": -1}
        state.loss_scaler = {"scale": float(scaler["scale"])} | counted


# -- out


def state_dicts(state: TrainingState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state dicts of the model and of the optimizer, with names and with tensors in a
    temporary file. What they cannot hold is added to what is missing.
    """
    if state.optimizer is None:
        raise UsageError(f"{state.source}: it has no optimizer state; use zero consolidate")
    lacks = {
        "loss scale": state.loss_scaler is not None,
        "client_state": bool(state.client_state),
        NO_SCHEDULE: state.lr_scheduler is not None
        and not any(path.name == SCHEDULER for path in state.beside),
    }
    state.missing += [what for what, is_lacking in lacks.items() if is_lacking]
    tensors = to_store(state)
    nbytes = sum(each.nbytes for each in tensors.values())
    kept: dict[str, Any] = on_disk(
        ((name, each.tensor()) for name, each in tensors.items()), nbytes
    )
    model = {name: kept[f"plain/{name}"] for name in state.buffers}
    optimizer: dict[str, dict[str, Any]] = {}
    for name, each in state.parameters.items():
        model[name] = kept[f"weights/{name}"]
        if each.state:
            optimizer[name] = {
                key: kept.get(f"optimizer/{key}/{name}", value) for key, value in each.state.items()
            }
    model |= {other: model[name] for other, name in state.tied.items()}
    groups = [
        options | {"params": [name for name, p in state.parameters.items() if p.group == index]}
        for index, options in enumerate(state.groups)
    ]
    return model, {"state": optimizer, "param_groups": groups}
