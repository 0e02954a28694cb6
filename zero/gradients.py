"""From `param.grad` of one backward to the reduced gradient of this rank's shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from zero.comm import Communicator, Pending
from zero.offload.tiers import Tier
from zero.unit import Unit


@dataclass
class _Reduction:
    """A reduction of `numel` elements into `out`, which becomes `unit.grad` if the gradient `stays` on the device."""

    unit: Unit
    numel: int
    out: torch.Tensor
    pending: Pending
    stays: bool


class _Collected:
    """The gradients of one unit that backward has produced and that are not reduced yet."""

    def __init__(self) -> None:
        self.flat: torch.Tensor | None = None
        # By parameter: its gradient if it is kept apart, None if it is in `flat`.
        self.parts: dict[int, torch.Tensor | None] = {}


class GradientReducer:
    """Collects each unit's gradients in one flat buffer, reduces it over ranks and adds it to `unit.grad`.

    Args: bucket_size: elements that may be on their way between ranks at a time, and in one collective; overlap:
    reductions run while backward goes on, else each is waited for at once; contiguous: gradients are copied to the
    flat buffer as they are produced, else kept apart until the unit is complete; dtype: in which gradients travel
    (None: that of the parameters); sum_dtype: in which the result is kept on the unit's `optimizer_tier`, and summed
    over micro-batches; deferred: gradients of all micro-batches are summed in a buffer of full size and reduced with
    the last one (stages 0 and 1), else each micro-batch's are reduced at once. `last_micro_step` tells which that is.

    `factor` multiplies what the present backward produces (1 unless the engine sets it). `norms` has the 2-norms
    of gradients that have left the compute device, taken before they left, by unit and the piece's start in the shard.
    `backwards` counts those that have ended since the last step.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        bucket_size: int,
        overlap: bool,
        contiguous: bool,
        dtype: torch.dtype | None = None,
        sum_dtype: torch.dtype = torch.float32,
        deferred: bool = False,
        last_micro_step: Callable[[], bool] = lambda: True,
    ):
        self.comm, self.dtype, self.sum_dtype = comm, dtype, sum_dtype
        self.bucket_size, self.overlap, self.contiguous = bucket_size, overlap, contiguous
        self.deferred, self.last_micro_step = deferred, last_micro_step
        self.factor = 1.0
        self._carried: dict[Unit, torch.Tensor] = {}
        self._collected: dict[Unit, _Collected] = {}
        self._in_flight: deque[_Reduction] = deque()
        self._leaving: deque[Pending] = deque()
        self._fresh: set[Unit] = set()
        self.norms: dict[tuple[Unit, int], torch.Tensor] = {}
        self.backwards = 0
        self.buffered = 0
        self.peak_buffered = 0

    def collect(self, unit: Unit, index: int) -> None:
        """Take over the gradient that autograd left on the unit's parameter number `index`."""
        param = unit.params[index]
        grad, param.grad = param.grad, None
        if grad.is_sparse:
            grad = grad.to_dense()
        entry = self._collected.setdefault(unit, _Collected())
        if not self.contiguous:
            earlier = entry.parts.get(index)
            entry.parts[index] = grad if earlier is None else earlier + grad
            return
        if entry.flat is None:
            entry.flat = self._flat(unit)
        target = self._place(unit, entry.flat, index)
        # A second gradient for the same parameter comes from reentrant checkpointing of shared weights.
        target.add_(grad) if index in entry.parts else target.copy_(grad)
        entry.parts[index] = None

    def collect_left(self, unit: Unit) -> None:
        """Before a step: take over gradients that the script put on parameters by itself, the same ones on all ranks.

        They are added to those of backwards; scaled, as those are, if there is a loss scale.
        """
        left = [index for index, param in enumerate(unit.params) if param.grad is not None]
        for index in left:
            self.collect(unit, index)
        if left:
            self.factor = 1.0
            self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        """Start reducing what was collected for `unit`; parameters without a gradient count as zero."""
        entry = self._collected.pop(unit, None)
        flat = self._flat(unit) if entry is None or entry.flat is None else entry.flat
        parts = {} if entry is None else entry.parts
        for index in range(len(unit.params)):
            target = self._place(unit, flat, index)
            if index not in parts:
                target.zero_()
            elif parts[index] is not None:
                target.copy_(parts[index])
        for start, end in unit.layout.gaps():
            flat[start:end].zero_()
        if self.factor != 1.0:
            flat.mul_(self.factor)
        if self.deferred:
            if unit in self._carried:
                self.buffered -= flat.numel()
                flat = self._carried.pop(unit).add_(flat)
            if not self.last_micro_step():
                self._carried[unit] = flat.to(self.sum_dtype)
                return
        self._start(unit, flat)

    def _start(self, unit: Unit, flat: torch.Tensor) -> None:
        unit.wait_for_update()  # which reads the gradient of the step before
        accumulate = unit in self._fresh
        self._fresh.add(unit)
        stays = unit.optimizer_tier == Tier(self.comm.device)
        if self.comm.world_size == 1 and flat.dtype == self.sum_dtype and (stays or not accumulate):
            # A world of one has nothing to exchange: the flat buffer is the result.
            out = unit.grad.add_(flat) if accumulate else flat
            self._finish(_Reduction(unit, flat.numel(), out, Pending(), stays))
            return
        while self._in_flight and sum(each.numel for each in self._in_flight) + flat.numel() > self.bucket_size:
            self._wait_oldest()
        out = self._result(unit, stays, accumulate)
        exchange = self.comm.reduce if unit.layout.replicated else self.comm.reduce_scatter
        pending = exchange(out, flat, accumulate, self.bucket_size, unit)
        self._in_flight.append(_Reduction(unit, flat.numel(), out, pending, stays))
        if not self.overlap:
            self._wait_oldest()

    def _result(self, unit: Unit, stays: bool, accumulate: bool) -> torch.Tensor:
        """A buffer on the compute device for the reduced gradient, with the sum so far if `accumulate`."""
        if stays and unit.grad is not None:
            return unit.grad
        out = torch.empty(unit.layout.shard_numel, dtype=self.sum_dtype, device=self.comm.device)
        if accumulate:
            self.drain()
            unit.optimizer_tier.load(out, unit.grad).wait()
        elif stays:
            unit.grad = out
        return out

    def _wait_oldest(self) -> None:
        self._finish(self._in_flight.popleft())

    def _finish(self, reduction: _Reduction) -> None:
        with self.comm.clock.waiting("reduce"):
            reduction.pending.wait()
        self.buffered -= reduction.numel
        if reduction.stays:
            reduction.unit.grad = reduction.out
        else:
            self._move_out(reduction.unit, reduction.out)

    def _move_out(self, unit: Unit, values: torch.Tensor) -> None:
        """Start to bring a reduced gradient to the optimizer's tier; at most two are on their way."""
        for piece in unit.layout.pieces(self.comm.rank):
            norm = torch.linalg.vector_norm(values[piece.start : piece.start + piece.numel], dtype=torch.float32)
            self.norms[unit, piece.start] = norm
        if unit.grad is None:
            unit.grad = unit.optimizer_tier.empty(values.numel(), self.sum_dtype)
        if len(self._leaving) == 2:
            self._wait_for_leaving()
        self._leaving.append(unit.optimizer_tier.store(unit.grad, values))

    def move(self, units: Iterable[Unit], tier: Tier) -> None:
        """Bring the units' gradients, whole or reduced, to other memory; nothing may be on its way."""
        for unit in units:
            for grad in (unit.grad, self._carried.get(unit)):
                if grad is not None:
                    grad.data = tier.keep(grad)

    def has_pending(self, unit: Unit) -> bool:
        """Whether gradients of `unit` were collected but not reduced."""
        return unit in self._collected

    def is_fresh(self, unit: Unit) -> bool:
        """Whether `unit.grad` holds a gradient of the current accumulation cycle."""
        return unit in self._fresh

    def carried(self, unit: Unit) -> torch.Tensor | None:
        """This rank's sum over micro-batches, as long as `unit.full`, that waits for the last one (stages 0, 1)."""
        return self._carried.get(unit)

    def settle(self, unit: Unit) -> None:
        """Before a step: reduce what still waited for a last micro-batch; zero where no backward gave a gradient."""
        if unit in self._carried:
            self._start(unit, self._carried.pop(unit))
        elif unit not in self._fresh:
            self._fresh.add(unit)
            stays = unit.optimizer_tier == Tier(self.comm.device)
            zeros = self._result(unit, stays, accumulate=False).zero_()
            self._finish(_Reduction(unit, 0, zeros, Pending(), stays))

    def reduce_carried(self) -> None:
        """Reduce now what waits for a last micro-batch. Every rank must call, having run as many backwards."""
        for unit in sorted(self._carried, key=lambda unit: unit.serial):
            self._start(unit, self._carried.pop(unit))
        self.drain()

    def drain(self) -> None:
        """Wait for all reductions in flight."""
        while self._in_flight:
            self._wait_oldest()
        while self._leaving:
            self._wait_for_leaving()

    def _wait_for_leaving(self) -> None:
        with self.comm.clock.waiting("gradients out"):
            self._leaving.popleft().wait()

    def clear(self) -> None:
        """Forget all gradients; their buffers are written anew in the next cycle."""
        self.drain()
        if self.deferred:
            # Until the last micro-batch the sum of this rank's gradients takes their place.
            for unit in self._fresh:
                unit.grad = None
        self._collected.clear()
        self._carried.clear()
        self._fresh.clear()
        self.norms.clear()
        self.buffered = self.backwards = 0

    def _flat(self, unit: Unit) -> torch.Tensor:
        self.buffered += unit.layout.padded
        self.peak_buffered = max(self.peak_buffered, self.buffered)
        return torch.empty(unit.layout.padded, dtype=self.dtype or unit.dtype, device=self.comm.device)

    @staticmethod
    def _place(unit: Unit, flat: torch.Tensor, index: int) -> torch.Tensor:
        slot = unit.layout.slots[index]
        return flat.narrow(0, slot.offset, slot.numel).view(slot.shape)
