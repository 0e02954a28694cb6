"""From `param.grad` of one backward to the reduced gradient of this rank's shard.

This file does not know when a group's gradients are complete, nor in which order reductions start
(`zero/core/reduction.py`), nor where the result lives (`zero/core/optimizer_shard.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zero.comm.clock import label
from zero.comm.communicator import Communicator
from zero.comm.work import Pending
from zero.core.optimizer_shard import OptimizerShard
from zero.core.param_group import ParamGroup
from zero.core.sharded_param import local
from zero.offload.tiers import Tier


@dataclass
class _Reduction:
    """A reduction of a buffer of `numel` elements into `out`, which then goes to `shard`."""

    shard: OptimizerShard
    numel: int
    out: torch.Tensor
    pending: Pending


# With `contiguous`, a group's gradients are copied to its flat buffer, in one call, when this many
# elements wait.
MOST_APART = 1 << 26


class _Collected:
    """The gradients of one group that backward has produced and that are not reduced yet."""

    def __init__(self) -> None:
        self.flat: torch.Tensor | None = None
        # By parameter: its gradient if it is kept apart, None if it is in `flat`.
        self.parts: dict[int, torch.Tensor | None] = {}
        # Elements that are kept apart.
        self.apart = 0


class GradientReducer:
    """Collects each group's gradients in one flat buffer, reduces it over ranks and adds it to the
    optimizer's shard.

    Args:
        shards: where the reduced gradients go, one for each trainable group. bucket_size: most
        elements in one reduction and in all reductions in flight. overlap: reductions run while
        backward goes on, else each is waited for at once. contiguous: gradients are copied to the
        flat buffer when `MOST_APART` elements wait, else when the group has all. dtype: in which
        gradients travel; None: that of the parameters, and for sums of micro-batches `sum_dtype`.
        sum_dtype: in which the result is kept, and summed over micro-batches. narrow: a result to
        which nothing is added stays in the dtype of the reduction, which loses nothing. deferred:
        gradients of several micro-batches are summed in a buffer of full size and of `sum_dtype`
        before they
            travel (stages 0 and 1). Else those of each micro-batch are reduced at once.
        reduces_now: whether the current micro-batch is the last one, with which a deferred sum is
        reduced.

    Attributes: backwards: how many have ended since the last step. buffered: elements in flat
    buffers."""

    def __init__(
        self,
        comm: Communicator,
        shards: Sequence[OptimizerShard],
        *,
        bucket_size: int,
        overlap: bool,
        contiguous: bool,
        dtype: torch.dtype | None = None,
        sum_dtype: torch.dtype = torch.float32,
        narrow: bool = False,
        deferred: bool = False,
        reduces_now: Callable[[], bool] = lambda: True,
    ):
        self.comm = comm
        self.dtype = dtype
        self.sum_dtype = sum_dtype
        self.narrow = narrow
        self._shards = {shard.group: shard for shard in shards}
        self.bucket_size = bucket_size
        self.overlap = overlap
        self.contiguous = contiguous
        self.deferred = deferred
        self.reduces_now = reduces_now
        self._factor = 1.0
        # Deferred sums.
        self._carried: dict[ParamGroup, torch.Tensor] = {}
        self._collected: dict[ParamGroup, _Collected] = {}
        self._in_flight: deque[_Reduction] = deque()
        self._offloading: deque[tuple[OptimizerShard, Pending]] = deque()
        # Groups whose shard holds a gradient of the current accumulation.
        self._fresh: set[ParamGroup] = set()
        self.buffered = self.backwards = 0

    def begin_backward(self, factor: float) -> None:
        """A backward begins, whose gradients are to be multiplied by `factor`."""
        self._factor = factor

    def end_backward(self) -> None:
        """Wait for all reductions of the backward."""
        self.drain()
        self.backwards += 1

    def collect(self, group: ParamGroup, index: int) -> None:
        """Take the gradient that autograd put on the group's parameter number `index`."""
        param = group.params[index]
        grad, param.grad = local(param.grad), None
        if grad.is_sparse:
            grad = grad.to_dense()
        entry = self._collected.setdefault(group, _Collected())
        if (
            index in entry.parts
        ):  # a second one comes from reentrant checkpointing of shared weights
            earlier = entry.parts[index]
            grad = (self._place(group, entry.flat, index) if earlier is None else earlier) + grad
        entry.parts[index] = grad
        entry.apart += grad.numel()
        if self.contiguous and entry.apart > MOST_APART:
            self._flatten(group, entry)

    def _flatten(self, group: ParamGroup, entry: _Collected) -> torch.Tensor:
        """Copy what is kept apart to the group's flat buffer, in one call."""
        if entry.flat is None:
            entry.flat = self._flat(group)
        apart = {index: grad for index, grad in entry.parts.items() if grad is not None}
        if apart:
            torch._foreach_copy_(
                [self._place(group, entry.flat, index) for index in apart], list(apart.values())
            )
        entry.parts.update(dict.fromkeys(apart))
        entry.apart = 0
        return entry.flat

    def collect_from_script(self, group: ParamGroup) -> None:
        """Before a step: take gradients that the script itself has put on parameters, the same ones
        on all ranks.

        They are added to those of backwards. With a loss scale they must be scaled as those are.
        """
        found = [index for index, param in enumerate(group.params) if param.grad is not None]
        for index in found:
            self.collect(group, index)
        if found:
            self._factor = 1.0
            self.reduce(group)

    def reduce(self, group: ParamGroup) -> None:
        """Start reducing what was collected for `group`; parameters without a gradient count as
        zero.
        """
        entry = self._collected.pop(group, None) or _Collected()
        flat = self._flatten(group, entry)
        rest = [
            self._place(group, flat, index)
            for index in range(len(group.params))
            if index not in entry.parts
        ]
        if zeros := rest + [flat[start:end] for start, end in group.layout.gaps()]:
            torch._foreach_zero_(zeros)
        if self._factor != 1.0:
            flat.mul_(self._factor)
        del entry  # a sum takes the place of its buffer
        if self.deferred:
            if group in self._carried:
                self.buffered -= flat.numel()
                flat = self._carried.pop(group).add_(flat)
            if not self.reduces_now():
                self._carried[group] = flat.to(self.sum_dtype)
                return
        self._start(group, flat)

    def _start(self, group: ParamGroup, flat: torch.Tensor) -> None:
        # the update of the step before reads the buffer that is about to be written
        group.wait_for_update()
        if self.dtype is not None and self.comm.world_size > 1:
            flat = flat.to(self.dtype)  # a sum of micro-batches is rounded once
        shard, accumulate = self._shards[group], group in self._fresh
        self._fresh.add(group)
        dtype = self._kept_dtype(flat.dtype, accumulate)
        if accumulate:
            self._finish_all_of(
                shard
            )  # the sum so far may not be complete, or not be written to its tier yet
            shard.widen_gradient(dtype)
        if (
            self.comm.world_size == 1
            and flat.dtype == dtype
            and not (shard.is_offloaded and accumulate)
        ):
            # A world of one has nothing to exchange: the flat buffer is the result.
            out = shard.grad.add_(flat) if accumulate else flat
            self._finish(_Reduction(shard, flat.numel(), out, Pending()))
            return
        while (
            self._in_flight
            and sum(each.numel for each in self._in_flight) + flat.numel() > self.bucket_size
        ):
            self._wait_oldest()
        out = shard.reduction_target(dtype, accumulate)
        exchange = self.comm.reduce if group.layout.replicated else self.comm.reduce_scatter
        with label(f"reduction of {group.name}"):
            pending = exchange(out, flat, accumulate, self.bucket_size, group)
        self._in_flight.append(_Reduction(shard, flat.numel(), out, pending))
        if not self.overlap:
            self._wait_oldest()

    def _kept_dtype(self, reduced: torch.dtype, accumulate: bool) -> torch.dtype:
        if self.narrow and not accumulate and self.reduces_now():
            return min(reduced, self.sum_dtype, key=lambda dtype: dtype.itemsize)
        return self.sum_dtype

    def _finish_all_of(self, shard: OptimizerShard) -> None:
        while any(each.shard is shard for each in self._in_flight):
            self._wait_oldest()
        while any(each is shard for each, _ in self._offloading):
            self._wait_for_offload()

    def _wait_oldest(self) -> None:
        self._finish(self._in_flight.popleft())

    def _finish(self, reduction: _Reduction) -> None:
        with self.comm.clock.waiting("reduce"):
            reduction.pending.wait()
        self.buffered -= reduction.numel
        if len(self._offloading) == 2:
            self._wait_for_offload()
        with label("gradients out"):
            written = reduction.shard.put_gradient(reduction.out)
        if reduction.shard.is_offloaded:
            self._offloading.append((reduction.shard, written))

    def move_carried(self, groups: Iterable[ParamGroup], tier: Tier) -> None:
        """Move the sums that wait for a last micro-batch to `tier`.

        No reduction may be in flight.
        """
        for group in groups:
            if group in self._carried:
                self._carried[group] = tier.keep(self._carried[group])

    def has_pending(self, group: ParamGroup) -> bool:
        """Whether gradients of `group` were collected but not reduced."""
        return group in self._collected

    def is_fresh(self, group: ParamGroup) -> bool:
        """Whether the group's shard holds a gradient of the current accumulation cycle."""
        return group in self._fresh

    def carried(self, group: ParamGroup) -> torch.Tensor | None:
        """This rank's sum over micro-batches, of the size of `group.full`, that waits for the last
        one (stages 0, 1).
        """
        return self._carried.get(group)

    def complete(self, group: ParamGroup) -> None:
        """Before a step: reduce what still waits for a last micro-batch; zero where no backward
        gave a gradient.
        """
        if group in self._carried:
            self._start(group, self._carried.pop(group))
        elif group not in self._fresh:
            self._fresh.add(group)
            shard = self._shards[group]
            zeros = shard.reduction_target(self.sum_dtype, accumulate=False).zero_()
            self._finish(_Reduction(shard, 0, zeros, Pending()))

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Context of backwards whose gradients are reduced at its end.

        Every rank must run the same number of them.
        """
        deferred, self.deferred = self.deferred, True
        try:
            yield
            for group in sorted(self._carried, key=lambda group: group.serial):
                self._start(group, self._carried.pop(group))
            self.drain()
        finally:
            self.deferred = deferred

    def drain(self) -> None:
        """Wait for all reductions in flight."""
        while self._in_flight:
            self._wait_oldest()
        while self._offloading:
            self._wait_for_offload()

    def _wait_for_offload(self) -> None:
        with self.comm.clock.waiting("gradients out"):
            self._offloading.popleft()[1].wait()

    def clear(self) -> None:
        """Forget all gradients; the next ones are written over them."""
        self.drain()
        for group, shard in self._shards.items():
            shard.end_cycle()
            if self.deferred and group in self._fresh:
                # until the last micro-batch, `_carried` has the sum of this rank's gradients
                shard.free_gradient()
        self._collected.clear()
        self._carried.clear()
        self._fresh.clear()
        self.buffered = self.backwards = 0

    def free(self) -> None:
        """Forget all gradients, and free their memory."""
        self.clear()
        for shard in self._shards.values():
            shard.free_gradient()

    def _flat(self, group: ParamGroup) -> torch.Tensor:
        self.buffered += group.layout.padded
        dtype = self.dtype or group.dtype
        if self.deferred and (group in self._carried or not self.reduces_now()):
            dtype = max(
                group.dtype, dtype, key=lambda dtype: dtype.itemsize
            )  # of a sum, that is rounded later
        return torch.empty(group.layout.padded, dtype=dtype, device=self.comm.device)

    @staticmethod
    def _place(group: ParamGroup, flat: torch.Tensor, index: int) -> torch.Tensor:
        slot = group.layout.slots[index]
        return flat.narrow(0, slot.offset, slot.numel).view(slot.shape)
