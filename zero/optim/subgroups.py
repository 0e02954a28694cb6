"""Sub-groups: the parts of the masters that the optimizer sees as its parameters, and its state for
each.

This file does not know when or how sub-groups are updated.

An optimizer counts the steps of each sub-group. Parameters that got no gradient in a step, so that
it does not count for them, are therefore split off from the others of their sub-group then, and
stay apart. The same happens when a checkpoint with different counts is loaded.

A torch optimizer keys its state by the parameter object, here a sub-group's master. So who moves
masters or state tensors must do it by `SubGroupState`, which keeps keys and param groups right."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import nn

from zero.comm.work import Pending
from zero.core.optimizer_shard import OptimizerShard
from zero.core.param_group import ParamGroup
from zero.errors import UsageError
from zero.offload.pinned import HostMemory, round_up
from zero.optim import adam8bit

# Each sub-group costs a tenth of a millisecond or more in a step. So a shard is split into more
# sub-groups than this only if they have at least as many elements as the second number says.
_MANY = 64
_TINY = 65536


@dataclass(eq=False)
class SubGroup:
    """A piece of one group's master that belongs to one param group: what the optimizer sees as a
    parameter.

    Attributes:
        optimizer: the user's.
        group_index: of the param group.
        start: position in the shard, in elements.
        master: a view of the shard's master, 1-D, fp32 or bf16.
    """

    optimizer: torch.optim.Optimizer
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

    @property
    def state(self) -> dict:
        """The optimizer's state of it, possibly empty, by the optimizer's names."""
        return self.optimizer.state.get(self.master, {})

    @property
    def is_in_files(self) -> bool:
        """Whether some of it may be in a file."""
        return self.shard.tier.file is not None or self.group.tier.file is not None

    @property
    def version(self) -> list[object]:
        """Changes when somebody gets the master or the state to change them, or has changed them
        in place.
        """
        counts: list[object] = [self.shard.handed_out]
        for each in (self.master, *self.state.values()):
            is_tensor = isinstance(each, torch.Tensor)
            counts.append((id(each), each._version) if is_tensor else each)
        return counts

    def put_state(self, state: dict) -> None:
        """Replace the state."""
        self.optimizer.state[self.master] = state

    def parts(self) -> Iterator[tuple[str, int, int, slice]]:
        """What it holds of parameters: see `ParamGroup.parts`."""
        return self.group.parts(self.start, self.end)

    def cut(self, borders: Collection[int]) -> list[tuple[SubGroup, dict]]:
        """Its parts between these positions in it, each with its state.

        Raises UsageError for state that has neither the parameters' size nor is a number.
        """
        return [
            (
                replace(self, start=self.start + first, master=self.master[first:end]),
                {key: self._part_of(key, each, first, end) for key, each in self.state.items()},
            )
            for first, end in pairwise(sorted({0, *borders, self.master.numel()}))
        ]

    def _part_of(self, key: str, value: Any, first: int, end: int) -> Any:
        """The elements from `first` to `end` of a value of its state."""
        numel = self.master.numel()
        if not is_state_tensor(value):
            return value.clone() if isinstance(value, torch.Tensor) else value
        if value.shape == self.master.shape:
            return value[first:end]
        if adam8bit.is_coded(value, numel):
            return self.shard.tier.keep(adam8bit.cut(value, numel, first, end))
        names = ", ".join(name for name, *_ in self.parts())
        raise UsageError(
            f"not all of the parameters {names} got a gradient in this step, and the optimizer has "
            f"one {key!r} for all of them: delete zero_optimization.elementwise_optimizer"
        )


def split_into_sub_groups(
    optimizer: torch.optim.Optimizer,
    shard: OptimizerShard,
    group_of: Mapping[nn.Parameter, int],
    most: int,
) -> Iterator[SubGroup]:
    """Split a master where the param group changes, and into sub-groups of at most `most` elements.

    Where that would make many tiny sub-groups, they are larger than `most`. A run of slots in one
    group is one sub-group, gaps included: gradients are zero there and stay so. Parameters that
    are in no group are in no sub-group, and stay as they are."""
    layout, (low, high) = shard.group.layout, shard.group.shard_range
    most = max(most, min(_TINY, math.ceil((high - low) / _MANY)))
    starts: list[tuple[int, int | None]] = []
    for param, slot in zip(shard.group.params, layout.slots, strict=True):
        index = group_of.get(param)
        if not starts or starts[-1][1] != index:
            starts.append((slot.offset, index))
    ends = [start for start, _ in starts[1:]] + [layout.padded]
    for (start, index), end in zip(starts, ends, strict=True):
        first, last = max(start, low), min(end, high)
        if index is None:
            continue
        for a in range(first, last, most):
            b = min(a + most, last)
            yield SubGroup(optimizer, shard, index, a - low, shard.master[a - low : b - low])


def is_state_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value in a sub-group's state is a tensor of its elements, such as `exp_avg`,
    and not a number.
    """
    return isinstance(value, torch.Tensor) and value.dim() > 0


class SubGroupInMemory:
    """One sub-group with everything in memory that its update needs.

    An update reads `grad` and changes or replaces `master` and `state` (values by the optimizer's
    names). `write` stores them. The gradient is not read before `read_gradient`.

    Args:
        buffers: host memory for what is read from files.
        for_weights: host memory for new values in the weights' dtype.

    Attributes:
        nbytes: of the buffers that it holds.
    """

    grad: torch.Tensor

    def __init__(self, sub_group: SubGroup, buffers: HostMemory, for_weights: HostMemory):
        self.sub_group = sub_group
        self._buffers = buffers
        self._for_weights = for_weights
        self._tier = sub_group.shard.tier
        self._reads: list[Pending] = []
        self._has_grad = False
        self.nbytes = 0
        self._stored = dict(sub_group.state)
        self._version = sub_group.version if sub_group.is_in_files else None
        self.master = self._read(sub_group.master)
        self.state = {
            key: self._read(value) if is_state_tensor(value) else value
            for key, value in self._stored.items()
        }

    def read_gradient(self) -> None:
        """Start to read the gradient, unless that is done."""
        if not self._has_grad:
            self._has_grad, grad = True, self.sub_group.shard.grad
            assert grad is not None, "in a step each shard has a gradient"
            self.grad = self._read(grad[self.sub_group.start : self.sub_group.end])

    @property
    def is_current(self) -> bool:
        """Whether nobody has changed master and state since they were read."""
        return self._version == self.sub_group.version

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a buffer to which it is being read."""
        if not self._tier.holds_in_file(tensor):
            return tensor
        buffer = self._buffers.like(tensor)
        self.nbytes += buffer.nbytes
        self._reads.append(self._tier.load(buffer, tensor))
        return buffer

    def wait(self) -> None:
        """Block until everything is in memory."""
        for read in self._reads:
            read.wait()

    def weights_target(self) -> torch.Tensor | None:
        """Host memory for the updated values in the weights' dtype: the shard's own if it is there.

        None for fp32, in which the master has them.
        """
        sub_group = self.sub_group
        shard = sub_group.group.shard[sub_group.start : sub_group.end]
        if shard.dtype == torch.float32:
            return None
        in_memory = shard.device.type == "cpu" and not sub_group.group.tier.holds_in_file(shard)
        return shard if in_memory else self._for_weights.take(shard.nbytes).view(shard.dtype)

    def write(self, rounded: Pending) -> Pending:
        """Start to store what the update has changed; `rounded` is the write to the weights.

        If masters are in a file, new state gets a place in it.
        """
        shard, tier, writes, stored = self.sub_group.shard, self._tier, [rounded], {}
        result = Pending(writes)
        shard.writes.append(result)  # before they begin: if one cannot, the others go on
        if self.master is not self.sub_group.master:
            writes.append(tier.store(self.sub_group.master, self.master))
        # The whole group counts: each sub-group may be small.
        file = tier.file if tier.puts_in_file(shard.master.nbytes) else None
        for key, value in self.state.items():
            place = self._stored.get(key)
            if not is_state_tensor(value):
                stored[key] = value
                continue
            if not (
                is_state_tensor(place) and tier.holds_in_file(place) and place.dtype == value.dtype
            ):
                place = value if file is None else file.empty(value.numel(), value.dtype)
            if place is not value:
                writes.append(tier.store(place, value))
            stored[key] = place
        self.sub_group.put_state(stored)
        return result


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
            for sub_group in split_into_sub_groups(optimizer, shard, group_of, sub_group_size)
        ]
        self._set_params()

    def _set_params(self) -> None:
        for index, param_group in enumerate(self._optimizer.param_groups):
            param_group["params"] = [
                sub_group.master for sub_group in self.sub_groups if sub_group.group_index == index
            ]

    def split_by(self, kind: Callable[[str], Hashable], block: int = 1) -> None:
        """Split sub-groups so that `kind`, a function of a parameter's name, has one value for all
        parameters of each. No value changes.

        A part that is longer than a `block` of elements begins where a block does.
        """
        parts: dict[SubGroup, list[tuple[SubGroup, dict]]] = {}
        for each in self.sub_groups:
            kinds = [(where.start, kind(name)) for name, _, _, where in each.parts()]
            borders = {start for (_, last), (start, new) in pairwise(kinds) if new != last}
            borders |= {min(round_up(start, block), each.master.numel()) for start in borders}
            if borders:
                parts[each] = each.cut(borders)
        for each, of_each in parts.items():
            self._optimizer.state.pop(each.master, None)
            place = self.sub_groups.index(each)
            self.sub_groups[place : place + 1] = [part for part, _ in of_each]
            for part, state in of_each:
                if state:
                    part.put_state(state)
        self._set_params()

    def follow_masters(self) -> None:
        """The masters have moved: make the sub-groups pieces of them again."""
        state = self._optimizer.state
        for sub_group in self.sub_groups:
            former = sub_group.master
            sub_group.master = sub_group.shard.master[sub_group.start : sub_group.end]
            if former in state:
                state[sub_group.master] = state.pop(former)
        self._set_params()
