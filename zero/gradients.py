"""From `param.grad` of one backward to the reduced gradient of this rank's shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from zero.comm import Communicator, Pending
from zero.tiers import Tier
from zero.unit import Unit


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
    (None: that of the parameters); tier and sum_dtype: where and in which dtype the result is kept, and summed over
    micro-batches; deferred: gradients of all micro-batches are summed in a buffer of full size and reduced with the
    last one (stages 0 and 1), else each micro-batch's are reduced at once. `last_micro_step` tells which one that is.

    `factor` multiplies what the present backward produces (1 unless the engine sets it). `backwards` counts those that
    have ended since the last step.
    """

    def __init__(
        self,
        comm: Communicator,
        tier: Tier,
        *,
        bucket_size: int,
        overlap: bool,
        contiguous: bool,
        dtype: torch.dtype | None = None,
        sum_dtype: torch.dtype = torch.float32,
        deferred: bool = False,
        last_micro_step: Callable[[], bool] = lambda: True,
    ):
        self.comm, self.tier, self.dtype, self.sum_dtype = comm, tier, dtype, sum_dtype
        self.bucket_size, self.overlap, self.contiguous = bucket_size, overlap, contiguous
        self.deferred, self.last_micro_step = deferred, last_micro_step
        self.factor = 1.0
        self._carried: dict[Unit, torch.Tensor] = {}
        self._collected: dict[Unit, _Collected] = {}
        self._in_flight: deque[tuple[int, Pending]] = deque()
        self._fresh: set[Unit] = set()
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
        accumulate = unit in self._fresh
        self._fresh.add(unit)
        if self.comm.world_size == 1 and flat.dtype == self.sum_dtype and self.tier.device == flat.device:
            # A world of one has nothing to exchange: the flat buffer is the result.
            unit.grad = unit.grad.add_(flat) if accumulate else flat
            self.buffered -= flat.numel()
            return
        if unit.grad is None:
            unit.grad = self.tier.empty(unit.layout.shard_numel, self.sum_dtype)
        while self._in_flight and sum(numel for numel, _ in self._in_flight) + flat.numel() > self.bucket_size:
            self._wait_oldest()
        exchange = self.comm.reduce if unit.layout.replicated else self.comm.reduce_scatter
        pending = exchange(unit.grad, flat, accumulate, self.bucket_size, unit)
        self._in_flight.append((flat.numel(), pending))
        if not self.overlap:
            self._wait_oldest()

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
            if unit.grad is None:
                unit.grad = self.tier.empty(unit.layout.shard_numel, self.sum_dtype)
            unit.grad.zero_()
            self._fresh.add(unit)

    def drain(self) -> None:
        """Wait for all reductions in flight."""
        while self._in_flight:
            self._wait_oldest()

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
        self.buffered = self.backwards = 0

    def _wait_oldest(self) -> None:
        numel, pending = self._in_flight.popleft()
        pending.wait()
        self.buffered -= numel

    def _flat(self, unit: Unit) -> torch.Tensor:
        self.buffered += unit.layout.padded
        self.peak_buffered = max(self.peak_buffered, self.buffered)
        return torch.empty(unit.layout.padded, dtype=self.dtype or unit.dtype, device=self.comm.device)

    @staticmethod
    def _place(unit: Unit, flat: torch.Tensor, index: int) -> torch.Tensor:
        slot = unit.layout.slots[index]
        return flat.narrow(0, slot.offset, slot.numel).view(slot.shape)
