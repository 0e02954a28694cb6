"""Tiles: the pieces of the masters that the optimizer sees as its parameters, and its state for
each.

This file does not know when or how tiles are updated.

A torch optimizer keys its state by the parameter object, here a tile's master. So who moves masters
or state tensors must do it by `TiledState`, which keeps keys and param groups right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero.core.optimizer_shard import OptimizerShard
from zero.core.param_group import ParamGroup
from zero.offload.tiers import Tier


@dataclass(eq=False)
class Tile:
    """A piece of one group's master that belongs to one param group: what the optimizer sees as a
    parameter.

    Attributes: group_index: of the param group. start: position in the shard, in elements. master:
    a view of the shard's master, 1-D, fp32 or bf16."""

    shard: OptimizerShard
    group_index: int
    start: int
    master: torch.Tensor

    @property
    def group(self) -> ParamGroup:
        return self.shard.group

    @property
    def end(self) -> int:
        return self.start + self.master.numel()


def cut(shard: OptimizerShard, group_of: Mapping[nn.Parameter, int], most: int) -> Iterator[Tile]:
    """Cut a master where the param group changes, and into tiles of at most `most` elements.

    A run of slots in one group is one tile, gaps included: gradients are zero there and stay so.
    Parameters that are in no group are in no tile, and stay as they are."""
    layout, (low, high) = shard.group.layout, shard.group.shard_range
    starts: list[tuple[int, int | None]] = []
    for param, slot in zip(shard.group.params, layout.slots, strict=True):
        group = group_of.get(param)
        if not starts or starts[-1][1] != group:
            starts.append((slot.offset, group))
    ends = [start for start, _ in starts[1:]] + [layout.padded]
    for (start, group), end in zip(starts, ends, strict=True):
        first, last = max(start, low), min(end, high)
        for a in range(first, last, most) if group is not None else ():
            b = min(a + most, last)
            yield Tile(shard, group, a - low, shard.master[a - low : b - low])


def is_state_tensor(value: object) -> bool:
    """Whether a value in a tile's state is a tensor of its elements, such as `exp_avg`, and not a
    number.
    """
    return isinstance(value, torch.Tensor) and value.dim() > 0


class TiledState:
    """The tiles of all masters as the parameters of `optimizer`, whose param groups get them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[OptimizerShard],
        group_of: Mapping[nn.Parameter, int],
        sub_group_size: int,
    ):
        self._optimizer = optimizer
        self.tiles = [tile for shard in shards for tile in cut(shard, group_of, sub_group_size)]
        self._set_params()

    def _set_params(self) -> None:
        for index, group in enumerate(self._optimizer.param_groups):
            group["params"] = [tile.master for tile in self.tiles if tile.group_index == index]

    def of(self, tile: Tile) -> dict:
        """The tile's state, possibly empty, by the optimizer's names."""
        return self._optimizer.state.get(tile.master, {})

    def put(self, tile: Tile, state: dict) -> None:
        """Replace the tile's state."""
        self._optimizer.state[tile.master] = state

    def nbytes(self, shard: OptimizerShard) -> int:
        """Bytes of the state tensors of one group."""
        states = (self.of(tile) for tile in self.tiles if tile.shard is shard)
        return sum(
            value.nbytes for state in states for value in state.values() if is_state_tensor(value)
        )

    def move(self, shard: OptimizerShard, tier: Tier) -> None:
        """Bring the state tensors of one group to `tier`."""
        for tile in self.tiles:
            if tile.shard is shard and (state := self.of(tile)):
                for key, value in state.items():
                    if is_state_tensor(value):
                        state[key] = tier.keep(value)

    def follow_masters(self) -> None:
        """The masters have moved: make the tiles pieces of them again."""
        state = self._optimizer.state
        for tile in self.tiles:
            former, tile.master = tile.master, tile.shard.master[tile.start : tile.end]
            if former in state:
                state[tile.master] = state.pop(former)
        self._set_params()
