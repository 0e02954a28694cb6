"""Decides which state of an engine goes into a checkpoint and under which names, and restores it.

    weights/NAME           fp32 master of a trainable parameter (its 16-bit weights are the
                           rounded master), or else the weights
    optimizer/KEY/NAME     an optimizer-state tensor, such as exp_avg, of that parameter
    optimizer/KEY/NAME/N   one of a different shape, such as sums over the rows of a matrix
    plain/NAME             a buffer, or a parameter that is not sharded

Quantized weights are not stored.

The first two kinds are stored as slices of flattened tensors, each by the rank that holds it. The
others are stored as a whole. See `zero.checkpoint.files`."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn

from zero.checkpoint.files import CheckpointReader, Slice, Stored, name_in
from zero.checkpoint.manifest import FORMAT, FORMAT_VERSION, Manifest
from zero.checkpoint.values import decode, describe, dtype_name, encode, rebuild
from zero.comm.communicator import Communicator
from zero.core.param_group import ParamGroup, owning_group
from zero.core.quantized_weights import keeps_codes_in_buffers, quantized_tensors
from zero.core.reduction import GradientReducer
from zero.core.sharded_param import Cut, PlaceholderView, cut_of, is_copy
from zero.device import is_accelerator, random_state, set_random_state
from zero.errors import UsageError
from zero.offload.tiers import HostTrimmer, Tier
from zero.optim.adam8bit import KEYS, decode_range, encoded, is_coded
from zero.optim.loss_scaler import LossScaler
from zero.optim.redistribute import WholeTensor
from zero.optim.sharded_optimizer import ZeroOptimizer, precise_values
from zero.optim.subgroups import SubGroup

logger = logging.getLogger("zero")

# Entries of a param group that are not stored: the tensors, and settings of the computation, which
# each run chooses for itself.
NOT_STORED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


@dataclass
class Progress:
    """How far a run is, and what goes on with it beside the model and the optimizer.

    Attributes:
        client_state: values of the user's script.
    """

    global_steps: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
    global_samples: int = 0
    gradient_accumulation_steps: int = 0
    loss_scaler: dict[str, Any] | None = None
    lr_scheduler: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> Progress:
        return Progress(**{name: decode(getattr(manifest, name)) for name in _PROGRESS})


_PROGRESS = [each.name for each in fields(Progress)]


def describe_progress(progress: Progress, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a manifest that says how far a run is and which tensors are whole."""
    return {name: encode(getattr(progress, name), name) for name in _PROGRESS} | {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "torch": torch.__version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plain": {
            name: {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
            for name, value in plain.items()
        },
        "files": {},
        "tensors": {},
    }


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What a checkpoint stores of an engine. A load changes it in place, except for `progress`, of
    which it returns a new one.

    Attributes:
        reducer: has the gradients, which are not stored.
        stage: ZeRO's stage.
        progress: the counters of steps, without the states of `scaler` and `lr_scheduler`.
    """

    module: nn.Module
    groups: Sequence[ParamGroup]
    comm: Communicator
    optimizer: ZeroOptimizer | None
    scaler: LossScaler | None
    lr_scheduler: Any
    reducer: GradientReducer
    stage: int
    progress: Progress


def describe_engine(engine: EngineState, client_state: dict, exclude_frozen: bool) -> dict:
    """Return the part of `checkpoint.json` that this rank knows."""
    optimizer, plain = engine.optimizer, plain_tensors(engine.module, exclude_frozen)
    require_values(engine.module, plain)
    progress = replace(
        engine.progress,
        loss_scaler=engine.scaler and engine.scaler.state_dict(),
        lr_scheduler=engine.lr_scheduler and engine.lr_scheduler.state_dict(),
        client_state=client_state,
    )
    places = saved_places(engine.module).items()
    description = describe_progress(progress, plain) | {
        "world_size": engine.comm.job.world_size,
        "stage": engine.stage,
        "frozen_excluded": exclude_frozen,
        "parameters": parameters(engine, exclude_frozen),
        "tied": tied_names(engine.module),
        "state_dict": {k: group.param_names[i] for k, (group, i) in places if not group.packed},
        "optimizer": None,
        "hf_config": model_config(engine.module),
        "base": {name: [] for name in _base_layers(engine.module)},
    }
    if optimizer is not None:
        classes, groups = classes_of(optimizer.optimizer), []
        for index, group in enumerate(optimizer.param_groups):
            stored = {key: value for key, value in group.items() if key not in NOT_STORED}
            groups.append(encode(stored, f"param_groups[{index}]"))
        description["optimizer"] = {"classes": classes, "groups": groups, "state": {}}
        for name, group in group_of(engine, optimizer).items():
            description["parameters"][name]["group"] = group
    return description


def slices_to_store(engine: EngineState, exclude_frozen: bool) -> tuple[list[Slice], dict]:
    """Return what this rank saves of all sharded parameters and of the optimizer's state, as views,
    and the kinds of optimizer state (see `optimizer_slices`).
    """
    slices, kinds = list(weights(engine, exclude_frozen)), {}
    if engine.optimizer is not None:
        of_optimizer, kinds = optimizer_slices(engine.optimizer)
        slices += of_optimizer
    holders = {name: group.comm for name, _, group in named_params(engine)}
    copies = {name for name, param, _ in named_params(engine) if is_copy(param)}
    cuts, stored = cuts_of(engine), []
    for each in slices:
        name = name_in(each.key)
        if name in cuts:
            each = each._replace(key=f"{each.key}@{cuts[name].index}")
        if name not in copies:  # another rank of the model group saves these copies
            comm = holders.get(name, engine.comm)
            replicas = comm.replicate_group
            rank, size = replicas.rank, replicas.size
            if engine.stage == 0:  # every rank holds everything
                rank, size = comm.rank, comm.world_size
            stored.append(each.share(rank, size))
    return stored, kinds


# -- the model


def named_params(engine: EngineState) -> Iterator[tuple[str, nn.Parameter, ParamGroup]]:
    """Yield all sharded parameters except those of a quantized base, with their names and the
    groups that hold their values.
    """
    for group in (group for group in engine.groups if not group.packed):
        for name, param in zip(group.param_names, group.params, strict=True):
            yield name, param, group


def cuts_of(engine: EngineState) -> dict[str, Cut]:
    """Return how parameters are split over a model group, by name, for those that are split."""
    cuts = ((name, cut_of(param)) for name, param, _ in named_params(engine))
    return {name: cut for name, cut in cuts if cut is not None}


def parameters(engine: EngineState, exclude_frozen: bool = False) -> dict[str, dict]:
    """Return the shape and compute dtype of each sharded parameter, in the model's order."""
    found, cuts = {}, cuts_of(engine)
    for name, param, group in named_params(engine):
        if group.trainable or not exclude_frozen:
            shape, dtype = list(param.shape), dtype_name(group.dtype)
            found[name] = {"shape": shape, "dtype": dtype, "trainable": group.trainable}
            if name in cuts:
                found[name]["cut"] = cuts[name].described
    return {name: found[name] for name, _ in engine.module.named_parameters() if name in found}


def weights(engine: EngineState, exclude_frozen: bool = False) -> Iterator[Slice]:
    """Return this rank's slices of all sharded parameters, as views."""
    for group in engine.groups:
        if group.packed or (exclude_frozen and not group.trainable):
            continue
        for name, numel, position, where in group.parts(0, group.layout.shard_numel):
            yield Slice(f"weights/{name}", numel, position, precise_values(group)[where])


def plain_tensors(
    model: nn.Module, exclude_frozen: bool = False, with_base: bool = False
) -> dict[str, torch.Tensor]:
    """Return persistent buffers and unsharded parameters, which are the same on all ranks.

    `exclude_frozen` leaves out frozen parameters, and what quantized layers add to their state
    dicts (scales and codes, which are neither parameters nor buffers). `with_base` includes those
    of a quantized base."""
    layers = {} if with_base else _base_layers(model)
    base = {id(tensor) for tensors in layers.values() for tensor in tensors}
    found = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and owning_group(value) is None and id(value) not in base
    }
    if not exclude_frozen:
        return found
    params = model.named_parameters(remove_duplicate=False)
    kept = {name for name, param in params if param.requires_grad}
    kept.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    return {n: value for n, value in found.items() if n in kept or n.endswith("_extra_state")}


def require_values(model: nn.Module, plain: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError if the model's state dict has views of sharded parameters, which have no
    values.
    """
    for name, value in plain.items():
        if isinstance(value, PlaceholderView):
            raise UsageError(
                f"state_dict() of {type(model).__name__} has {name!r} without values: have it pass "
                f"on `keep_vars`, and leave the sharded {value.param_name!r} as it is"
            )


def _base_layers(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each quantized layer, by the layer's name."""
    buffers = None if keeps_codes_in_buffers(model) else False
    layers = {
        name: [each.tensor for each in quantized_tensors(module, buffers)]
        for name, module in model.named_modules()
    }
    return {name: tensors for name, tensors in layers.items() if tensors}


def saved_places(model: nn.Module) -> dict[str, tuple[ParamGroup, int]]:
    """Return where sharded tensors are, by their keys in `model.state_dict()`: the group, and the
    index in it. A key need not be the parameter's name, because a class may override the method.
    """
    places = {}
    for key, value in model.state_dict(keep_vars=True).items():
        group = owning_group(value) if isinstance(value, torch.Tensor) else None
        if group is not None:
            places[key] = group, group.index[value]
    return places


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return {other name: name} for parameters that the model has under several names."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(param, name) for name, param in named}
    return {name: other for name, other in names.items() if name != other}


def model_config(model: nn.Module) -> dict | None:
    """Return what transformers writes to `config.json`, if this is one of its models."""
    as_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if as_json is None:
        return None
    return json.loads(as_json(use_diff=False)) | {"architectures": [type(model).__name__]}


# -- optimizer state


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (bool, int, float))


def optimizer_slices(optimizer: ZeroOptimizer) -> tuple[list[Slice], dict[str, dict]]:
    """Return this rank's part of the optimizer state.

    The result is (slices, kinds). For each key of the state, kinds has its dtype if it is sliced
    like the parameter. If it is one number for each parameter, kinds has the numbers of the
    parameters that begin on this rank, by name. Anything else that an optimizer of whole tensors
    keeps is described in kinds, by name."""
    is_whole, package = optimizer.whole is not None, _package_of(optimizer)
    strangers = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if is_whole and strangers:
        raise UsageError(
            f"optimizer state {strangers[0]!r} belongs to no parameter, so it cannot be stored"
        )
    slices: list[Slice] = []
    kinds: dict[str, dict] = {}
    for unit in optimizer.units:
        shape, parts = _shape_and_parts(unit)
        for key, value in unit.state.items():
            if not is_whole:
                if value is None:
                    continue
                if key in KEYS and is_coded(value, shape.numel()):
                    read = partial(decode_range, key, value, shape.numel())
                    value = Stored(shape, torch.float32, read)
            kind, first = kinds.setdefault(key, {}), parts[0][0] if parts else "no parameter"
            place = f"optimizer state {key!r} of {first}"
            is_tensor = isinstance(value, torch.Tensor | Stored)
            is_sliced = is_tensor and value.shape == shape
            if _is_number(value) and (is_whole or not is_sliced):
                numbers = kind.setdefault("numbers", {})
                numbers |= {name: encode(value, place) for name, _, at, _ in parts if at == 0}
            elif is_sliced:
                kind.setdefault("dtype", dtype_name(value.dtype))
                if isinstance(value, torch.Tensor):
                    value = value.detach().contiguous().view(-1)
                slices += [
                    Slice(f"optimizer/{key}/{name}", numel, position, value[where])
                    for name, numel, position, where in parts
                ]
            elif is_whole:
                found: list[torch.Tensor] = []
                kind.setdefault("whole", {})[first] = describe(value, found, place, package)
                for number, each in enumerate(found):
                    stored = f"optimizer/{key}/{first}/{number}"
                    slices.append(Slice.whole(stored, each.contiguous()))
            else:
                raise UsageError(
                    f"optimizer state {key!r}: neither a tensor of the parameter's size nor a "
                    "number, so it cannot be stored"
                )
    return slices, kinds


def _shape_and_parts(
    unit: SubGroup | WholeTensor,
) -> tuple[torch.Size, list[tuple[str, int, int, slice]]]:
    """Return the shape of the tensors in a unit's state, and what they hold of parameters: see
    `SubGroup.parts`.
    """
    if isinstance(unit, WholeTensor):
        return unit.slot.shape, [(unit.name, unit.slot.numel, 0, slice(None))]
    return unit.master.shape, list(unit.parts())


def _package_of(optimizer: ZeroOptimizer) -> str | None:
    """Return the package whose objects the optimizer may keep as state, or None for torch's own."""
    package = type(optimizer.optimizer).__module__.partition(".")[0]
    return None if package == "torch" else package


def read_optimizer_state(optimizer: ZeroOptimizer, reader: CheckpointReader) -> None:
    """Give each of this rank's sub-groups or whole tensors its stored state.

    Sub-groups whose parameters have different numbers, such as steps, are split. Raises ValueError
    if it cannot be read."""
    slices: list[Slice] = []
    stored = reader.manifest.optimizer
    assert stored is not None
    is_whole, coded = optimizer.whole is not None, optimizer.state_dtype == torch.uint8
    own_dtype = torch.float32 if coded else optimizer.state_dtype  # of all except coded tensors
    optimizer.state.clear()  # free memory for the state to be read
    HostTrimmer(every=0).freed_elements(0)

    def described(name: str) -> tuple[object, ...]:
        return tuple(
            (repr((kind.numbers or {}).get(name)), reader.holds(f"optimizer/{key}/{name}"))
            for key, kind in stored.state.items()
        )

    def of(name: str) -> int | None:
        return reader.manifest.parameters[name].group

    def target(tier: Tier, key: str, number: int, shape: Sequence[int]) -> torch.Tensor:
        key = f"{key}/{number}"
        values = tier.empty(math.prod(shape), reader.dtype(key)).view(tuple(shape))
        slices.append(Slice.whole(key, values))
        return values

    optimizer.split_sub_groups(described)
    for unit in optimizer.units:
        shape, parts = _shape_and_parts(unit)
        if not parts:
            # a sub-group of padding gets its state from the optimizer, as it did when training
            # began
            continue
        state, first = {}, parts[0][0]  # in the order in which it was created
        unit.put_state(state)
        group, tier = optimizer.param_groups[unit.group_index], unit.shard.tier
        for key, kind in stored.state.items():
            stored_key = f"optimizer/{key}/{first}"
            if is_whole and kind.whole and first in kind.whole:
                make = partial(target, tier, stored_key)
                state[key] = rebuild(kind.whole[first], make, _package_of(optimizer))
            elif kind.numbers and first in kind.numbers:
                state[key] = _number(key, kind.numbers[first], group, unit.shard.master.device)
            elif reader.holds(stored_key):  # else it had no gradient, or its group needs none
                dtype = reader.dtype(stored_key)
                if coded and key in KEYS:
                    values = torch.zeros(shape, dtype=torch.float32, device="cpu")
                else:
                    floats = not is_whole and dtype in (torch.float32, torch.bfloat16)
                    values = tier.zeros(shape.numel(), own_dtype if floats else dtype).view(shape)
                state[key] = values
                slices += [
                    Slice(f"optimizer/{key}/{name}", numel, position, values.view(-1)[where])
                    for name, numel, position, where in parts
                ]
        for key, kind in stored.state.items() if state and not is_whole else ():
            if key not in state and any(of(name) == of(first) for name in kind.numbers or ()):
                raise ValueError(f"the checkpoint has no optimizer state {key!r} of {first!r}")
        if coded and KEYS[0] in state:
            # sub-group by sub-group: fp32 moments of all of them may not fit into memory
            reader.read(slices)
            slices.clear()
            codes = encoded(state, into={})
            state |= {key: tier.keep(value) for key, value in codes.items()}
    reader.read(slices)


def _number(key: str, stored: Any, group: dict, device: torch.device) -> object:
    """Return a number, such as `step`, of a sub-group or a whole tensor."""
    number = decode(stored)
    # torch's optimizers count steps on the host unless their kernels read the count.
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return number.to("cpu" if on_host else device) if isinstance(number, torch.Tensor) else number


# -- param groups


def group_of(engine: EngineState, optimizer: ZeroOptimizer) -> dict[str, int]:
    """Return the index of each parameter's param group, by name, if it has one."""
    groups = {param: index for index, group in enumerate(optimizer.model_params) for param in group}
    named = [each for each in named_params(engine) if each[2] in optimizer.shards]
    return {name: groups[param] for name, param, _ in named if param in groups}


def classes_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the class and its bases. Optimizers with a common class, such as AdamW and Adam, can
    exchange their state.
    """
    general = (torch.optim.Optimizer, object)
    return [kind.__name__ for kind in type(optimizer).__mro__ if kind not in general]


def restore_group_settings(
    engine: EngineState, optimizer: ZeroOptimizer, manifest: Manifest
) -> None:
    """Set the hyperparameters of the param groups as torch does, if the number of groups is the
    same.

    Otherwise set only the learning rates, each from the stored group of the group's first
    parameter.
    """
    assert manifest.optimizer is not None
    groups, settings = optimizer.param_groups, decode(manifest.optimizer.groups)
    new_settings = dict(enumerate(settings))
    if len(groups) != len(settings):
        if engine.comm.job.rank == 0:
            logger.warning(
                "the checkpoint has %d param groups, the optimizer %d: only learning rates are "
                "taken over",
                *(len(settings), len(groups)),
            )
        new_settings = {}
        first = {index: name for name, index in reversed(group_of(engine, optimizer).items())}
        for index, name in first.items():
            new = settings[manifest.parameters[name].group]
            new_settings[index] = {key: new[key] for key in ("lr", "initial_lr") if key in new}
    for index, new in new_settings.items():
        for key, value in new.items():
            if isinstance(groups[index].get(key), torch.Tensor):
                groups[index][key].fill_(value)
            else:
                groups[index][key] = value


# -- random states


def random_states(device: torch.device) -> object:
    """Return the states of this process's generators in Python, numpy and torch."""
    version, words, gauss = random.getstate()
    states = {
        "python": (version, numpy.array(words, dtype=numpy.uint32), gauss),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if is_accelerator(device):
        states[device.type] = random_state(device)
    return encode(states, "random_states")


def restore_random_states(stored: object, device: torch.device) -> None:
    states = decode(stored)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if is_accelerator(device) and device.type in states:
        set_random_state(device, states[device.type])
