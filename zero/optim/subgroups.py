"""Sub-groups: the pieces of the masters that the optimizer sees as its parameters, and its state
for each.

This file does not know when or how sub-groups are updated.

A torch optimizer keys its state by the parameter object, here a sub-group's master. So who moves
masters or state tensors must do it by `SubGroupState`, which keeps keys and param groups right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import nn

from zero.core.optimizer_shard import OptimizerShard
from zero.core.param_group import ParamGroup
from zero.offload.tiers import Tier


@dataclass(eq=False)
class SubGroup:
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


def split_into_sub_groups(
    shard: OptimizerShard, group_of: Mapping[nn.Parameter, int], most: int
) -> Iterator[SubGroup]:
    """Split a master where the param group changes, and into sub-groups of at most `most` elements.

    A run of slots in one group is one sub-group, gaps included: gradients are zero there and stay
    so. Parameters that are in no group are in no sub-group, and stay as they are."""
    layout, (low, high) = shard.group.layout, shard.group.shard_range
    starts: list[tuple[int, int | None]] = []
    for param, slot in zip(shard.group.params, layout.slots, strict=True):
        group = group_of.get(param)
        if not starts or starts[-1][1] != group:
            starts.append((slot.offset, group))
    ends = [start for start, _ in starts[1:]] + [layout.padded]
    for (start, group), end in zip(starts, ends, strict=True):
        first, last = max(start, low), min(end, high)
        if group is None:
            continue
        for a in range(first, last, most):
            b = min(a + most, last)
            yield SubGroup(shard, group, a - low, shard.master[a - low : b - low])


def is_state_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value in a sub-group's state is a tensor of its elements, such as `exp_avg`,
    and not a number.
    """
    return isinstance(value, torch.Tensor) and value.dim() > 0


class SubGroupState:
    """The sub-groups of all masters as the parameters of `optimizer`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[OptimizerShard],
        group_of: Mapping[nn.Parameter, int],
        sub_group_size: int,
    ):
        self._optimizer = optimizer
        self.sub_groups = [
            sub_group
            for shard in shards
            for sub_group in split_into_sub_groups(shard, group_of, sub_group_size)
        ]
        self._set_params()

    def _set_params(self) -> None:
        for index, group in enumerate(self._optimizer.param_groups):
            group["params"] = [
                sub_group.master for sub_group in self.sub_groups if sub_group.group_index == index
            ]

    def state_of(self, sub_group: SubGroup) -> dict:
        """The sub-group's state, possibly empty, by the optimizer's names."""
        return self._optimizer.state.get(sub_group.master, {})

    def put_state(self, sub_group: SubGroup, state: dict) -> None:
        """Replace the sub-group's state."""
        self._optimizer.state[sub_group.master] = state

    def nbytes(self, shard: OptimizerShard) -> int:
        """Bytes of the state tensors of one group."""
        states = (
            self.state_of(sub_group) for sub_group in self.sub_groups if sub_group.shard is shard
        )
        return sum(
            value.nbytes for state in states for value in state.values() if is_state_tensor(value)
        )

    def move(self, shard: OptimizerShard, tier: Tier) -> None:
        """Bring the state tensors of one group to `tier`."""
        for sub_group in self.sub_groups:
            if sub_group.shard is shard and (state := self.state_of(sub_group)):
                for key, value in state.items():
                    if is_state_tensor(value):
                        state[key] = tier.keep(value)

    def follow_masters(self) -> None:
        """The masters have moved: make the sub-groups pieces of them again."""
        state = self._optimizer.state
        for sub_group in self.sub_groups:
            former, sub_group.master = (
                sub_group.master,
                sub_group.shard.master[sub_group.start : sub_group.end],
            )
            if former in state:
                state[sub_group.master] = state.pop(former)
        self._set_params()
