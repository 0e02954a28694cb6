"""The order of reductions: when a unit's gradients are complete, and when their reduction may start.

This file knows nothing of modules or of what is gathered. How a reduction is made: `zero/gradients.py`.

[Note: order of reductions]
Every rank starts its reductions in one agreed order, each as soon as it and all before it are complete. So ranks whose
graphs differ (an expert used on one rank only, a skipped layer) never wait for different units. At first this is the
reversed order of the units. After backward 1, 2, 4, 8, ... rank 0 tells the others the order in which its units
completed, as DistributedDataParallel rebuilds its buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zero.comm import Communicator
from zero.gradients import GradientReducer
from zero.unit import Unit


class ReductionOrder:
    """Follows the gradients of one backward at a time and starts reductions in the agreed order.

    Order of calls in a backward: `collect` for each gradient, `complete` for each unit that has all of them, `finish`.
    """

    def __init__(self, units: Sequence[Unit], reducer: GradientReducer, comm: Communicator):
        self._units, self._reducer, self._comm = list(units), reducer, comm
        # These units complete last: their parameters are used all over the model, or at both of its ends.
        last = [unit for unit in units if unit.persistent or unit.shared]
        first = [unit for unit in units if unit not in last]
        self._order = [unit for unit in [*reversed(first), *reversed(last)] if unit.trainable]
        self._collected: dict[Unit, set[int]] = {unit: set() for unit in units}
        self._complete: dict[Unit, None] = {}
        self._started = self._backwards = 0

    def collect(self, unit: Unit, index: int) -> bool:
        """Take the gradient of the unit's parameter number `index`; whether the unit has all of its gradients now."""
        self._reducer.collect(unit, index)
        self._collected[unit].add(index)
        return self.is_complete(unit)

    def is_complete(self, unit: Unit) -> bool:
        return len(self._collected[unit]) == len(unit.params)

    def complete(self, unit: Unit) -> None:
        """The unit has all of its gradients: its reduction starts as soon as those before it have started."""
        self._complete[unit] = None
        while self._started < len(self._order) and self._order[self._started] in self._complete:
            self._reducer.reduce(self._order[self._started])
            self._started += 1

    def missing(self) -> Iterator[str]:
        """Names of the trainable parameters without a gradient in this backward."""
        for unit in self._order:
            for i, name in enumerate(unit.param_names):
                if unit.params[i].requires_grad and i not in self._collected[unit]:
                    yield name

    def finish(self) -> None:
        """The backward is over: reduce the rest, the same units in the same order on every rank, and wait."""
        again = [unit for unit in self._order[: self._started] if self._reducer.has_pending(unit)]
        for unit in self._order[self._started :] + again:
            self._reducer.reduce(unit)
        self._agree()
        self._reducer.end_backward()

    def _agree(self) -> None:
        self._backwards += 1
        if self._comm.world_size > 1 and self._backwards & (self._backwards - 1) == 0:
            units = [*self._complete, *(unit for unit in self._order if unit not in self._complete)]
            numbers = {unit: i for i, unit in enumerate(self._units)}
            order = torch.tensor([numbers[unit] for unit in units], device=self._comm.device)
            self._comm.broadcast(order, src=0)
            self._order = [self._units[i] for i in order.tolist()]
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of a backward that is over, or that ended in an exception."""
        self._complete.clear()
        self._started = 0
        for collected in self._collected.values():
            collected.clear()
