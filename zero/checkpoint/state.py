"""Which state of an engine goes into a checkpoint, under which names, and how it is restored.

    weights/NAME           fp32 master of a trainable parameter (its 16-bit weights are that,
                           rounded), else the weights
    optimizer/KEY/NAME     an optimizer-state tensor, such as exp_avg, of that parameter
    optimizer/KEY/NAME/N   one of another shape, such as sums over the rows of a matrix
    plain/NAME             a buffer, or a parameter that is not sharded

The first two kinds are stored as slices of flattened tensors, each by the rank that holds it. The
others are stored as a whole. See `zero.checkpoint.files`."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy
import torch
from torch import nn

from zero.checkpoint.files import SliceReader, Slices, add, whole
from zero.checkpoint.manifest import Manifest
from zero.checkpoint.values import decode, describe, dtype_name, dtype_of, encode, rebuild
from zero.comm.communicator import Communicator
from zero.config import Config
from zero.core.param_group import ParamGroup
from zero.core.reduction import GradientReducer
from zero.core.sharded_param import owning_group
from zero.device import is_accelerator, random_state, set_random_state
from zero.errors import UsageError
from zero.offload.tiers import HostTrimmer
from zero.optim.adam8bit import KEYS, CodedSlice, encoded
from zero.optim.loss_scaler import LossScaler
from zero.optim.sharded_optimizer import ZeroOptimizer, precise_values
from zero.optim.subgroups import SubGroup
from zero.optim.whole_tensor import WholeTensor, WholeTensorState

logger = logging.getLogger("zero")

# Entries of a param group that are not stored: the tensors, and how to compute, which each run
# decides.
_NOT_STORED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


class Trained(Protocol):
    """What a checkpoint needs from an engine; the attributes are those of
    `zero.engine.ZeroEngine`.
    """

    module: nn.Module
    groups: Sequence[ParamGroup]
    comm: Communicator
    settings: Config
    reducer: GradientReducer
    optimizer: ZeroOptimizer | None
    scaler: LossScaler | None
    lr_scheduler: Any
    global_steps: int
    micro_steps: int
    skipped_steps: int
    global_samples: int

    def zero_grad(self) -> None:
        """Forget the accumulated gradients."""

    def set_progress(
        self, global_steps: int, micro_steps: int, skipped_steps: int, global_samples: int
    ) -> None:
        """Go on counting from here."""


# -- weights


def weights(engine: Trained, exclude_frozen: bool = False) -> dict[str, Slices]:
    """This rank's slices of all sharded parameters, as views."""
    found: dict[str, Slices] = {}
    for param_group in engine.groups:
        if exclude_frozen and not param_group.trainable:
            continue
        for piece in param_group.pieces:
            values = precise_values(param_group)[piece.start : piece.start + piece.numel]
            name, slot = param_group.param_names[piece.slot], param_group.layout.slots[piece.slot]
            add(found, f"weights/{name}", slot.numel, piece.inside, values)
    return found


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers and parameters that are not sharded: the same on all ranks."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and owning_group(value) is None
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """{another name: the name} of parameters that the model has under several names."""
    first: dict[nn.Parameter, str] = {}
    names = {
        name: first.setdefault(param, name)
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    return {name: other for name, other in names.items() if name != other}


# -- optimizer state


def _parts(sub_group: SubGroup) -> Iterator[tuple[str, int, int, slice]]:
    """What a sub-group holds of parameters: (name, its elements, position in it, where that is in
    the sub-group's tensors)."""
    for piece in sub_group.group.pieces:
        first, end = (
            max(piece.start, sub_group.start),
            min(piece.start + piece.numel, sub_group.end),
        )
        if first < end:
            name, numel = (
                sub_group.group.param_names[piece.slot],
                sub_group.group.layout.slots[piece.slot].numel,
            )
            yield (
                name,
                numel,
                piece.inside + first - piece.start,
                slice(first - sub_group.start, end - sub_group.start),
            )


def optimizer_slices(engine: Trained) -> tuple[dict[str, Slices], dict[str, dict]]:
    """This rank's part of the optimizer state.

    Returns (slices, kinds). For each key of the state, kinds has its dtype, if it is sliced like
    the parameter. If it is one number for each parameter, kinds has the numbers of the parameters
    that begin on this rank, by name. What an optimizer of whole tensors keeps besides is described
    in kinds, by name."""
    if engine.optimizer.whole is not None:
        if strangers := [
            key for key in engine.optimizer.state if not isinstance(key, torch.Tensor)
        ]:
            raise UsageError(
                f"optimizer state {strangers[0]!r} belongs to no parameter, so it cannot be stored"
            )
        return _whole_slices(engine.optimizer.whole)
    slices: dict[str, Slices] = {}
    kinds: dict[str, dict] = {}
    for sub_group in engine.optimizer.sub_groups:
        for key, value in engine.optimizer.state.get(sub_group.master, {}).items():
            if value is None:
                continue
            value = CodedSlice.of(key, value, sub_group.master.numel())
            kind = kinds.setdefault(key, _kind(key, value, sub_group.master))
            for name, numel, position, where in _parts(sub_group):
                if "dtype" in kind:
                    add(slices, f"optimizer/{key}/{name}", numel, position, value[where])
                elif position == 0:
                    kind["numbers"][name] = encode(value, f"optimizer state {key!r} of {name}")
    return slices, kinds


def _kind(key: str, value: object, master: torch.Tensor) -> dict:
    if isinstance(value, (torch.Tensor, CodedSlice)) and value.shape == master.shape:
        return {"dtype": dtype_name(value.dtype)}
    if isinstance(value, (bool, int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    ):
        return {"numbers": {}}
    raise UsageError(
        f"optimizer state {key!r}: neither a tensor of the parameter's size nor a number, so it "
        "cannot be stored"
    )


def _whole_slices(state: WholeTensorState) -> tuple[dict[str, Slices], dict[str, dict]]:
    """As `optimizer_slices`: of the tensors that this rank owns."""
    slices: dict[str, Slices] = {}
    kinds: dict[str, dict] = {}
    for tensor in state.own:
        for key, value in state.state_of(tensor).items():
            kind, place = kinds.setdefault(key, {}), f"optimizer state {key!r} of {tensor.name}"
            if (
                isinstance(value, torch.Tensor)
                and value.shape == tensor.slot.shape
                and value.numel() > 1
            ):
                kind.setdefault("dtype", dtype_name(value.dtype))
                slices[f"optimizer/{key}/{tensor.name}"] = whole(value.contiguous())
            elif isinstance(value, (bool, int, float)) or (
                isinstance(value, torch.Tensor) and value.numel() == 1
            ):
                kind.setdefault("numbers", {})[tensor.name] = encode(value, place)
            else:
                found: list[torch.Tensor] = []
                kind.setdefault("whole", {})[tensor.name] = describe(value, found, place)
                for number, each in enumerate(found):
                    slices[f"optimizer/{key}/{tensor.name}/{number}"] = whole(each.contiguous())
    return slices, kinds


def read_optimizer_state(engine: Trained, reader: SliceReader) -> None:
    """Give each of this rank's sub-groups or whole tensors the state that is stored.

    Raises ValueError if it cannot be read, or the parameters of one sub-group disagree about a
    number."""
    optimizer, slices = engine.optimizer, {}
    coded = optimizer.state_dtype == torch.uint8
    own_dtype = torch.float32 if coded else optimizer.state_dtype  # of all but the coded ones
    optimizer.state.clear()  # free the memory for what is read
    HostTrimmer(every=0).freed_elements(0)
    for tensor in () if optimizer.whole is None else optimizer.whole.own:
        optimizer.whole.put_state(
            tensor, _whole_state(tensor, reader, optimizer.param_groups, slices)
        )
    for sub_group in optimizer.sub_groups:
        parts = list(_parts(sub_group))
        if not parts:
            # a sub-group of padding gets its state from the optimizer, as it did when training
            # began
            continue
        state = optimizer.state[
            sub_group.master
        ] = {}  # in the order in which the optimizer made them
        names, group = [name for name, *_ in parts], optimizer.param_groups[sub_group.group_index]
        for key, kind in reader.manifest.optimizer.state.items():
            if not any(
                name in (kind.numbers or ()) or reader.holds(f"optimizer/{key}/{name}")
                for name in names
            ):
                continue  # the param group needs none, as one of SGD without momentum
            if kind.numbers is not None:
                state[key] = _number(key, kind.numbers, names, group, sub_group.master.device)
                continue
            dtype, tier, size = dtype_of(kind.dtype), sub_group.shard.tier, sub_group.master.numel()
            if coded and key in KEYS:
                state[key] = torch.zeros(size, dtype=torch.float32, device="cpu")
            else:
                floats = dtype in (torch.float32, torch.bfloat16)
                state[key] = tier.zeros(size, own_dtype if floats else dtype)
            for name, numel, position, where in parts:
                add(slices, f"optimizer/{key}/{name}", numel, position, state[key][where])
        if (
            coded and KEYS[0] in state
        ):  # sub-group by sub-group: fp32 moments of all of them may not fit into memory
            reader.read(slices)
            slices.clear()
            state |= {
                key: sub_group.shard.tier.keep(value)
                for key, value in encoded(state, into={}).items()
            }
    reader.read(slices)


def _whole_state(
    tensor: WholeTensor, reader: SliceReader, groups: list[dict], slices: dict[str, Slices]
) -> dict[str, object]:
    """The stored state of a whole tensor, whose memory `slices` are to fill."""
    state, tier = {}, tensor.shard.tier

    def target(stored: str, number: int | None, shape: Sequence[int]) -> torch.Tensor:
        stored = stored if number is None else f"{stored}/{number}"
        if stored not in reader.tensors:
            raise ValueError(f"the checkpoint has no {stored}")
        values = tier.empty(math.prod(shape), reader.dtype(stored)).view(tuple(shape))
        slices[stored] = whole(values)
        return values

    for key, kind in reader.manifest.optimizer.state.items():
        stored = f"optimizer/{key}/{tensor.name}"
        if kind.whole is not None and tensor.name in kind.whole:
            state[key] = rebuild(kind.whole[tensor.name], partial(target, stored))
        elif kind.numbers is not None and tensor.name in kind.numbers:
            state[key] = _number(
                key, kind.numbers, [tensor.name], groups[tensor.group_index], tier.device
            )
        elif stored in reader.tensors:
            state[key] = target(stored, None, tensor.slot.shape)
    return state


def _number(
    key: str, numbers: dict[str, object], names: list[str], group: dict, device: torch.device
) -> object:
    """A sub-group's number, such as `step`, which must be equal for all parameters in the
    sub-group.
    """
    if missing := [name for name in names if name not in numbers]:
        raise ValueError(f"the checkpoint has no optimizer state {key!r} of {missing[0]!r}")
    if different := [name for name in names if numbers[name] != numbers[names[0]]]:
        raise UsageError(
            f"optimizer state {key!r} differs between parameters {names[0]!r} and "
            f"{different[0]!r}; lower "
            "zero_optimization.sub_group_size or put them into different param groups"
        )
    number = decode(numbers[names[0]])
    # torch's optimizers count steps on the host unless their kernels read the count.
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return number.to("cpu" if on_host else device) if isinstance(number, torch.Tensor) else number


def group_of(engine: Trained) -> dict[str, int]:
    """The index of the param group of each parameter that is in one, by name."""
    groups = {
        param: index for index, group in enumerate(engine.optimizer.model_params) for param in group
    }
    return {
        name: groups[param]
        for param_group in engine.optimizer.shards
        for name, param in zip(param_group.param_names, param_group.params, strict=True)
        if param in groups
    }


# -- param groups


def classes_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The class and its bases: optimizers with a class in common can exchange their state, as AdamW
    and Adam.
    """
    return [
        kind.__name__
        for kind in type(optimizer).__mro__
        if kind not in (torch.optim.Optimizer, object)
    ]


def group_settings(engine: Trained) -> list[object]:
    return [
        encode(
            {key: value for key, value in group.items() if key not in _NOT_STORED},
            f"param_groups[{index}]",
        )
        for index, group in enumerate(engine.optimizer.param_groups)
    ]


def restore_group_settings(engine: Trained, manifest: Manifest) -> None:
    """Set the hyperparameters of the param groups as torch does if there are as many groups as
    there were.

    Else only the learning rates, each from the stored group of the group's first parameter.
    """
    groups, settings = engine.optimizer.param_groups, decode(manifest.optimizer.groups)
    if len(groups) == len(settings):
        for group, new in zip(groups, settings, strict=True):
            _set(group, new)
        return
    if engine.comm.job.rank == 0:
        text = (
            "the checkpoint has %d param groups, the optimizer %d: only learning rates are "
            "taken over"
        )
        logger.warning(text, len(settings), len(groups))
    first = {index: name for name, index in reversed(group_of(engine).items())}
    for index, name in first.items():
        new = settings[manifest.parameters[name].group]
        _set(groups[index], {key: new[key] for key in ("lr", "initial_lr") if key in new})


def _set(group: dict, new: dict) -> None:
    for key, value in new.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


# -- random states


def random_states(device: torch.device) -> object:
    """The states of Python's, numpy's and torch's generators of this process."""
    version, words, gauss = random.getstate()
    states = {
        "python": (version, numpy.array(words, dtype=numpy.uint32), gauss),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if is_accelerator(device):
        states[device.type] = random_state(device)
    return encode(states, "random_states")


def restore_random_states(encoded: object, device: torch.device) -> None:
    states = decode(encoded)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if is_accelerator(device) and device.type in states:
        set_random_state(device, states[device.type])
