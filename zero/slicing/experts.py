"""Gathers and runs experts in slices, a few at a time, if they do not fit in the memory for
gathered weights.

transformers packs the experts of a layer into parameters whose first dimension is the expert. A
slice is a range of experts. It is run by the module's own forward on a copy of the module that
contains only these experts, just as transformers runs the experts of one rank under expert
parallelism: `num_experts` is the number in the slice, and tokens of other experts get the index
`num_experts`. The results of all slices are added.

The backward pass gathers and runs each slice again, because only the inputs are kept. All ranks run
the same slices in the same order, so that their gathers match. In training they run all slices,
because the many tokens choose nearly all experts. Without gradients, as in generation, the ranks
agree on the experts that some token has chosen. The gradient of all experts is kept whole until it
is reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch

from zero.comm.work import Pending
from zero.core.gathering import Gathering
from zero.core.layout import packs_experts
from zero.core.param_group import ParamGroup, owning_group
from zero.core.sharded_param import local
from zero.slicing.head import autocast_now


def can_be_sliced(group: ParamGroup) -> bool:
    """Whether the group consists of all experts of one of transformers' modules, not quantized.
    Small parameters may be in a persistent group.
    """
    if group.persistent or group.packed or len(group.modules) != 1:
        return False
    module: Any = group.modules[0]
    if not (packs_experts(module) and hasattr(module, "_is_expert_parallel")):
        return False
    for param in module.parameters():
        owner = owning_group(param)
        if owner is None or not (owner is group or owner.persistent):
            return False
        if len(local(param)) != module.num_experts:
            return False
    return True


def numel_of_one(group: ParamGroup) -> int:
    """Return the number of elements of one expert."""
    module: Any = group.modules[0]
    return group.layout.numel // module.num_experts


class SlicedExperts:
    """Replaces the forward of a module of experts. The group's own hooks must not be installed.

    Args:
        group: a group for which `can_be_sliced` is true.
        most: the largest number of elements in a slice, which has at least one expert.
        gathering: notified when a slice is about to be gathered.
    """

    module: Any

    def __init__(self, group: ParamGroup, most: int, gathering: Gathering):
        (self.module,) = group.modules
        self.group = group
        self._gathering = gathering
        own = dict(self.module.named_parameters(recurse=False))
        self.names = tuple(own)
        self.params = tuple(own.values())
        self._numel_of_one = numel_of_one(group)
        self._step = max(1, most // self._numel_of_one)
        group.modules.clear()
        # Disabled here instead of by a decorator, which would import the compiler together with
        # this file.
        self._run: Any = torch.compiler.disable(partial(_InSlices.apply, self))
        self.module.forward = self

    def remove(self) -> None:
        """Restore the module's own forward."""
        self.group.modules.append(self.module)
        del self.module.forward

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run the experts. The arguments have transformers' names."""
        ranges = self._ranges(top_k_index)
        return self._run(ranges, hidden_states, top_k_index, top_k_weights, *self.params)

    def __deepcopy__(self, memo: dict) -> Callable:
        """A copy of the module has ordinary parameters, and its own forward."""
        return MethodType(type(self.module).forward, memo[id(self.module)])

    def _ranges(self, index: torch.Tensor) -> list[tuple[int, int]]:
        """Return (first expert, end) of each slice, equal on all ranks, which must all call this.

        `index`: the indices of the chosen experts.
        """
        chosen = [1.0] * self.module.num_experts
        if not torch.is_grad_enabled():
            marks = torch.zeros(len(chosen), dtype=torch.float32, device=index.device)
            marks[index.flatten()] = 1.0
            chosen = self.group.comm.all_reduce(marks, of_shards=True).tolist()
        found: list[tuple[int, int]] = []
        for number, mark in enumerate(chosen):
            if not mark:
                continue
            first, end = found[-1] if found else (0, -1)
            if number == end and number - first < self._step:
                found[-1] = (first, number + 1)
            else:
                found.append((number, number + 1))
        return found

    def slices(
        self, ranges: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Yield (first expert, end, their part of each parameter), in memory that is reused for the
        next slice.
        """
        for first, end in ranges:
            numel = (end - first) * self._numel_of_one
            self._gathering.before_part(self.group)
            self.group.residency.add(numel)
            try:
                yield first, end, self._gather(first, end)
            finally:
                self.group.residency.remove(numel)

    @torch.no_grad()
    def _gather(self, first: int, end: int) -> list[torch.Tensor]:
        found, works, shard = [], [], self.group.shard
        for param in self.params:
            if owning_group(param) is not self.group:
                found.append(param.detach()[first:end])
                continue
            slot = self.group.layout.slots[self.group.index[param]]
            row = slot.numel // self.module.num_experts
            shape, device = (end - first, *slot.shape[1:]), self.group.comm.device
            part = torch.empty(shape, dtype=self.group.dtype, device=device)
            start = slot.offset + first * row
            works.append(self.group.gather_range(part.view(-1), start, shard))
            found.append(part)
        with self.group.comm.clock.waiting("gather"):
            Pending(works).wait()
        return found

    def run(
        self, first: int, end: int, values: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return what the experts from `first` to `end` add to the output.

        `inputs` are the inputs of the module's forward.
        """
        hidden, index, weights = inputs
        there = (index >= first) & (index < end)
        part: Any = object.__new__(type(self.module))
        part.__dict__ = {key: value for key, value in vars(self.module).items() if key != "forward"}
        part._parameters = dict(zip(self.names, values, strict=True))
        part.num_experts = end - first
        part._is_expert_parallel = True
        own = torch.where(there, index - first, end - first)
        return part.forward(hidden, own, weights.masked_fill(~there, 0))


class _InSlices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        experts: SlicedExperts,
        ranges: list[tuple[int, int]],
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        *params: Any,
    ) -> torch.Tensor:
        ctx.experts = experts
        ctx.ranges = ranges
        ctx.autocast = autocast_now(hidden.device.type)
        ctx.save_for_backward(hidden, index, weights)
        total = _zeros_for_a_sum(hidden)
        for first, end, values in experts.slices(ranges):
            total.add_(experts.run(first, end, values, (hidden, index, weights)))
        return total.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        experts, (hidden, index, weights) = ctx.experts, ctx.saved_tensors
        of_inputs = [_zeros_for_a_sum(hidden), _zeros_for_a_sum(weights)]
        of_params: list[torch.Tensor | None] = []
        for param, needed in zip(experts.params, ctx.needs_input_grad[5:], strict=True):
            like = {"dtype": param.dtype, "device": grad.device}
            of_params.append(torch.zeros(param.shape, **like) if needed else None)
        for first, end, values in experts.slices(ctx.ranges):
            with torch.enable_grad(), ctx.autocast():
                leaves = [value.detach().requires_grad_() for value in (hidden, weights, *values)]
                out = experts.run(first, end, leaves[2:], (leaves[0], index, leaves[1]))
            if not out.requires_grad:
                continue  # none of this rank's tokens chose one of these experts
            slices = [None if whole is None else whole[first:end] for whole in of_params]
            pairs = zip([*of_inputs, *slices], leaves, strict=True)
            wanted = [(target, leaf) for target, leaf in pairs if target is not None]
            sources = [leaf for _, leaf in wanted]
            found = torch.autograd.grad(out, sources, grad, allow_unused=True)
            for (target, _), part in zip(wanted, found, strict=True):
                if part is not None:
                    target.add_(part)
        of_hidden, of_weights = of_inputs[0].to(hidden.dtype), of_inputs[1].to(weights.dtype)
        return None, None, of_hidden, None, of_weights, *of_params


def _zeros_for_a_sum(like: torch.Tensor) -> torch.Tensor:
    """Return zeros to which the results of slices are added, in at least fp32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(like.shape, dtype=dtype, device=like.device)
