"""What of an engine goes into a checkpoint, under which names, and how it comes back.

    weights/NAME           fp32 master of a trainable parameter (its 16-bit weights are that, rounded), else the weights
    optimizer/KEY/NAME     an optimizer-state tensor, such as exp_avg, of that parameter; or a number, such as step
    plain/NAME             a buffer, or a parameter that is not sharded

All keys but the last kind name slices of flattened tensors. See `zero.checkpoint.slices`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
from torch import nn

from zero.checkpoint.slices import Slices, add, whole
from zero.checkpoint.values import decode, dtype_name, dtype_of, encode
from zero.layout import Piece
from zero.optim.updates import Tile
from zero.unit import Unit, unit_of

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

logger = logging.getLogger("zero")

# Of a param group: the tensors, and how to compute, which is for the present run to say.
_NOT_STORED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
_NUMBERS = {"bool": bool, "int": int, "float": float}


# -- weights


def values_of(unit: Unit) -> torch.Tensor:
    """This rank's slice of the unit in the most precise form there is."""
    unit.wait_for_update()
    return unit.shard if unit.master is None else unit.master


def weights(engine: ZeroEngine, exclude_frozen: bool = False) -> dict[str, Slices]:
    """This rank's slices of all sharded parameters, as views."""
    found: dict[str, Slices] = {}
    for unit in engine.units:
        if exclude_frozen and not unit.trainable:
            continue
        for piece in unit.layout.pieces(engine.comm.rank):
            values = values_of(unit)[piece.start : piece.start + piece.numel]
            name, slot = unit.param_names[piece.slot], unit.layout.slots[piece.slot]
            add(found, f"weights/{name}", slot.numel, piece.inside, values)
    return found


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers and parameters that are not sharded: the same on all ranks."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and unit_of(value) is None and value.numel()
    }


def is_empty(value: object) -> bool:
    """Whether it is a tensor without elements."""
    return isinstance(value, torch.Tensor) and value.numel() == 0


def tied_names(model: nn.Module) -> dict[str, str]:
    """{another name: the name} of parameters that the model has under several names."""
    first: dict[nn.Parameter, str] = {}
    tied = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(param, name) != name:
            tied[name] = first[param]
    return tied


# -- optimizer state


def _covered(tile: Tile, rank: int) -> Iterator[tuple[Piece, int, int]]:
    """The pieces of parameters in a tile: (piece, first, end), positions in the unit's shard."""
    for piece in tile.unit.layout.pieces(rank):
        first, end = max(piece.start, tile.start), min(piece.start + piece.numel, tile.end)
        if first < end:
            yield piece, first, end


def optimizer_slices(engine: ZeroEngine) -> tuple[dict[str, Slices], dict[str, dict], dict[str, int]]:
    """This rank's part of the optimizer state.

    Returns (slices, kinds, group_of): kinds tells for each state key whether it is sliced like the parameter or one
    "number" for each parameter, and its dtype or Python type; group_of is the param group of each parameter seen.
    """
    slices: dict[str, Slices] = {}
    kinds: dict[str, dict] = {}
    group_of: dict[str, int] = {}
    optimizer = engine.optimizer
    states = optimizer.state
    for tile in optimizer.tiles:
        state = states.get(tile.master, {})
        for piece, first, end in _covered(tile, engine.comm.rank):
            name, numel = tile.unit.param_names[piece.slot], tile.unit.layout.slots[piece.slot].numel
            group_of[name] = tile.group
            position = piece.inside + first - piece.start
            for key, value in state.items():
                if value is None:
                    continue
                kinds[key] = _kind(key, value, tile.master)
                stored = f"optimizer/{key}/{name}"
                if not kinds[key]["number"]:
                    add(slices, stored, numel, position, value[first - tile.start : end - tile.start])
                elif position == 0:
                    number = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
                    slices[stored] = whole(number.contiguous())
    return slices, kinds, group_of


def _kind(key: str, value: object, master: torch.Tensor) -> dict:
    if isinstance(value, torch.Tensor) and value.shape == master.shape:
        return {"number": False, "dtype": dtype_name(value.dtype)}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"number": True, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if type(value).__name__ in _NUMBERS:
        return {"number": True, "type": type(value).__name__}
    raise ValueError(
        f"optimizer state {key!r}: neither a tensor of the parameter's size nor a number, so it cannot be stored"
    )


@dataclass
class _TileState:
    """State to be given to a tile once it has been read."""

    tile: Tile
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, list[tuple[str, torch.Tensor]]]


class OptimizerTarget:
    """Memory for the optimizer state of this rank's tiles: read into `slices`, then `install`."""

    def __init__(self, engine: ZeroEngine, kinds: dict[str, dict]):
        self.optimizer, self.kinds = engine.optimizer, kinds
        self.optimizer.state.clear()  # what is read needs its room
        self.slices: dict[str, Slices] = {}
        self._states = []
        for tile in self.optimizer.tiles:
            pieces = list(_covered(tile, engine.comm.rank))
            # A tile of nothing but padding gets its state from the optimizer, as it did when training began.
            if pieces:
                self._states.append(self._prepare(tile, pieces))

    def _prepare(self, tile: Tile, pieces: list[tuple[Piece, int, int]]) -> _TileState:
        state = _TileState(tile, {}, {})
        for key, kind in self.kinds.items():
            if not kind["number"]:
                tier = tile.unit.optimizer_tier
                state.tensors[key] = tier.zeros(tile.master.numel(), dtype_of(kind["dtype"]))
        for piece, first, end in pieces:
            name, numel = tile.unit.param_names[piece.slot], tile.unit.layout.slots[piece.slot].numel
            position = piece.inside + first - piece.start
            for key, kind in self.kinds.items():
                stored = f"optimizer/{key}/{name}"
                if kind["number"]:
                    number = torch.zeros(1, dtype=dtype_of(kind.get("dtype", "float64")))
                    # Several tiles may want the same number; one reading serves them all.
                    number = self.slices.setdefault(stored, whole(number)).parts[0]
                    state.numbers.setdefault(key, []).append((name, number))
                else:
                    add(self.slices, stored, numel, position, state.tensors[key][first - tile.start : end - tile.start])
        return state

    def install(self) -> None:
        """Give the optimizer what was read; ValueError if one tile's parameters disagree about a number."""
        for state in self._states:
            values: dict[str, object] = dict(state.tensors)
            for key, numbers in state.numbers.items():
                (name, first), *others = numbers
                if different := [other for other, number in others if not torch.equal(number, first)]:
                    raise ValueError(
                        f"optimizer state {key!r} differs between parameters {name!r} and {different[0]!r}; lower "
                        "zero_optimization.sub_group_size or put them into different param groups"
                    )
                values[key] = self._number(key, first, state.tile)
            # In the order of the stored kinds, which is that in which the optimizer made them.
            self.optimizer.state[state.tile.master] = {key: values[key] for key in self.kinds}

    def _number(self, key: str, number: torch.Tensor, tile: Tile) -> object:
        kind = self.kinds[key]
        if "type" in kind:
            return _NUMBERS[kind["type"]](number.item())
        group = self.optimizer.param_groups[tile.group]
        # torch's optimizers count steps on the host unless their kernels read the count.
        on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
        return number.clone().view(kind["shape"]).to("cpu" if on_host else tile.master.device)


# -- param groups


def classes_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names by which optimizers that share their state's meaning are recognised: AdamW is an Adam."""
    return [kind.__name__ for kind in type(optimizer).__mro__ if kind not in (torch.optim.Optimizer, object)]


def group_settings(engine: ZeroEngine) -> list[object]:
    return [
        encode({key: value for key, value in group.items() if key not in _NOT_STORED}, f"param_groups[{index}]")
        for index, group in enumerate(engine.optimizer.param_groups)
    ]


def restore_group_settings(
    engine: ZeroEngine, stored: list[object], stored_group_of: dict[str, int], group_of: dict[str, int]
) -> None:
    """Set the hyperparameters of the param groups as torch does if there are as many groups as there were.

    Else only the learning rates, each from the stored group of the group's first parameter.
    """
    groups = engine.optimizer.param_groups
    settings = [decode(group) for group in stored]
    if len(groups) == len(settings):
        for group, new in zip(groups, settings, strict=True):
            _set(group, new)
        return
    if engine.comm.rank == 0:
        logger.warning(
            "the checkpoint has %d param groups, the optimizer %d: only learning rates are taken over",
            len(settings),
            len(groups),
        )
    for index, group in enumerate(groups):
        first = next((name for name, number in group_of.items() if number == index and name in stored_group_of), None)
        if first is not None:
            new = settings[stored_group_of[first]]
            _set(group, {key: new[key] for key in ("lr", "initial_lr") if key in new})


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
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return encode(states, "random_states")


def restore_random_states(encoded: object, device: torch.device) -> None:
    states = decode(encoded)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
