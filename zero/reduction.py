"""The order of reductions: when a unit's gradients are complete, and when their reduction may start.

This file knows nothing of modules or of what is gathered. How a reduction is made: `zero/gradients.py`.

[Note: order of reductions]
Every rank starts its reductions in one agreed order, each as soon as it and all before it are complete. So ranks whose
graphs differ (an expert used on one rank only, a skipped layer) never wait for different units. At first this is the
reversed order of the units. After backward 1, 2, 4, 8, ... rank 0 tells the others the order in which its units
completed, as DistributedDataParallel rebuilds its buckets. Persistent and shared units always come last.

[Note: place of a reduction]
NCCL can block for ever if ranks start operations of two communicators in different orders. On gloo, while a rank waits
because `reduce_bucket_size` is used up, it joins no all-gather. So it must not wait for a reduction that others start
only after later all-gathers. On NCCL, and with leaf modules, rank 0 broadcasts after which unit use each reduction
starts. All-gathers start at uses, the same on all ranks. If a rank's gradients are not complete at the use after that,
the reduction starts without those that are missing: an expert that was not used has none. Gradients of persistent and
shared units may come from anywhere in the model, so these units are reduced at the end. Before the first broadcast, in
the first backward, reductions start as they can, or at the end if the model has leaf modules.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence

import torch

from zero.comm import Communicator
from zero.gradients import GradientReducer
from zero.layout import LEAF_FLAG
from zero.unit import Unit


class ReductionOrder:
    """Follows the gradients of one backward at a time and starts reductions in the agreed order.

    Order of calls in a backward: `begin`, `before_use` whenever a unit is about to be used, `collect` for each
    gradient, `complete` for each unit that has all of them, `finish`.
    """

    def __init__(self, units: Sequence[Unit], reducer: GradientReducer, comm: Communicator):
        self._units, self._reducer, self._comm = list(units), reducer, comm
        # Their parameters are used all over the model, or at both of its ends. Below stage 3 all units are persistent,
        # and nothing is gathered in backward: then no unit has to come last.
        last = {unit for unit in units if unit.persistent or unit.shared}
        self._last = last if len(last) < len(units) else set()
        self._order = sorted((unit for unit in reversed(units) if unit.trainable), key=self._last.__contains__)
        self._collected: dict[Unit, set[int]] = {unit: set() for unit in units}
        # Complete units in the order in which they became so, each with the number of unit uses before that.
        self._complete: dict[Unit, int] = {}
        self._places: dict[Unit, int] | None = None
        self._has_leaves = any(getattr(module, LEAF_FLAG, False) for unit in units for module in unit.modules)
        self._has_places = comm.matches_by_order or (comm.world_size > 1 and self._has_leaves)
        self._started = self._backwards = self._uses = 0
        self._is_open, self._absent = False, frozenset()

    def begin(self, absent: Collection[Unit] = frozenset()) -> None:
        """A backward begins. Units in `absent` get no gradients on any rank, and are not reduced."""
        self._uses, self._is_open, self._absent = 0, True, absent

    def before_use(self) -> None:
        """A unit is about to be used, and others prefetched: reductions that all ranks start before that start now."""
        if self._is_open:
            if self._places is not None and self._has_places:
                while self._started < len(self._order) and self._places[self._order[self._started]] <= self._uses:
                    self._start_next()
            self._uses += 1

    def collect(self, unit: Unit, index: int) -> bool:
        """Take the gradient of the unit's parameter number `index`; whether the unit has all of its gradients now."""
        self._reducer.collect(unit, index)
        self._collected[unit].add(index)
        return self.is_complete(unit)

    def is_complete(self, unit: Unit) -> bool:
        return len(self._collected[unit]) == len(unit.params)

    def complete(self, unit: Unit) -> None:
        """The unit has all of its gradients: its reduction starts as soon as those before it have started."""
        self._complete[unit] = self._uses
        while self._started < len(self._order) and self._may_start(self._order[self._started]):
            self._start_next()

    def _may_start(self, unit: Unit) -> bool:
        if unit in self._absent:
            return True
        if unit not in self._complete or not self._has_places:
            return unit in self._complete
        return not self._has_leaves if self._places is None else self._places[unit] <= self._uses

    def _start_next(self) -> None:
        if self._order[self._started] not in self._absent:
            self._reducer.reduce(self._order[self._started])
        self._started += 1

    def missing(self) -> Iterator[str]:
        """Names of the trainable parameters without a gradient in this backward."""
        for unit in (unit for unit in self._order if unit not in self._absent):
            for i, name in enumerate(unit.param_names):
                if unit.params[i].requires_grad and i not in self._collected[unit]:
                    yield name

    def finish(self) -> None:
        """The backward is over: reduce the rest, the same units in the same order on every rank, and wait."""
        again = [unit for unit in self._order[: self._started] if self._reducer.has_pending(unit)]
        for unit in self._order[self._started :] + again:
            if unit not in self._absent:
                self._reducer.reduce(unit)
        self._agree()
        self._reducer.end_backward()

    def _agree(self) -> None:
        """After backward 1, 2, 4, 8, ...: take over rank 0's order and places. See the notes."""
        self._backwards += 1
        if self._comm.world_size > 1 and self._backwards & (self._backwards - 1) == 0:
            places = {unit: place for unit, place in self._complete.items() if unit not in self._last}
            rest = [unit for unit in self._order if unit not in places]
            places |= {unit: sys.maxsize if unit in self._last else self._uses for unit in rest}
            numbers = {unit: i for i, unit in enumerate(self._units)}
            told = torch.tensor([[numbers[unit], place] for unit, place in places.items()], device=self._comm.device)
            self._comm.broadcast(told, src=0)
            self._places = {self._units[i]: place for i, place in told.tolist()}
            self._order = list(self._places)
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of a backward that is over, or that ended in an exception."""
        self._complete.clear()
        self._started, self._is_open = 0, False
        for collected in self._collected.values():
            collected.clear()
