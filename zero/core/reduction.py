"""The order of reductions: when a group's gradients are complete, and when their reduction may
start.

This file knows nothing of modules or of what is gathered. How a reduction is made:
`zero/core/gradients.py`.

[Note: order of reductions] Every rank starts its reductions in one agreed order, each as soon as it
and all before it are complete. So ranks whose graphs differ (an expert used on one rank only, a
skipped layer) never wait for different groups. At first this is the reversed order of the groups.
After backward 1, 2, 4, 8, ... rank 0 tells the others the order in which its groups completed, as
DistributedDataParallel rebuilds its buckets. Persistent and shared groups always come last.

[Note: place of a reduction] NCCL can block for ever if ranks start operations of two communicators
in different orders. On gloo, while a rank waits because `reduce_bucket_size` is used up, it joins
no all-gather. So it must not wait for a reduction that others start only after later all-gathers.
On NCCL, and with leaf modules, rank 0 broadcasts after which group use each reduction starts.
All-gathers start at uses, the same on all ranks. If a rank's gradients are not complete at the use
after that, the reduction starts without those that are missing: an expert that was not used has
none. Gradients of persistent and shared groups may come from anywhere in the model, so these groups
are reduced at the end. Before the first broadcast, in the first backward, reductions start as they
can, or at the end if the model has leaf modules."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence

import torch

from zero.comm.communicator import Communicator
from zero.core.gradients import GradientReducer
from zero.core.layout import LEAF_FLAG
from zero.core.param_group import ParamGroup


class ReductionOrder:
    """Follows the gradients of one backward at a time and starts reductions in the agreed order.

    Order of calls in a backward: `begin`, `before_use` whenever a group is about to be used,
    `collect` for each gradient, `complete` for each group that has all of them, `finish`."""

    def __init__(self, groups: Sequence[ParamGroup], reducer: GradientReducer, comm: Communicator):
        self._groups = list(groups)
        self._reducer = reducer
        self._comm = comm
        # Their parameters are used all over the model, or at both of its ends. Below stage 3 all
        # groups are persistent, and nothing is gathered in backward: then no group has to come
        # last.
        last = {group for group in groups if group.persistent or group.shared}
        self._last = last if len(last) < len(groups) else set()
        self._order = sorted(
            (group for group in reversed(groups) if group.trainable), key=self._last.__contains__
        )
        self._collected: dict[ParamGroup, set[int]] = {group: set() for group in groups}
        # Complete groups in the order in which they became so, each with the number of group uses
        # before that.
        self._complete: dict[ParamGroup, int] = {}
        self._places: dict[ParamGroup, int] | None = None
        self._has_leaves = any(
            getattr(module, LEAF_FLAG, False) for group in groups for module in group.modules
        )
        self._has_places = comm.matches_by_order or (comm.world_size > 1 and self._has_leaves)
        self._started = self._backwards = self._uses = 0
        self._is_open = False
        self._absent = frozenset()

    def begin(self, absent: Collection[ParamGroup] = frozenset()) -> None:
        """A backward begins.

        Groups in `absent` get no gradients on any rank, and are not reduced.
        """
        self._uses = 0
        self._is_open = True
        self._absent = absent

    def before_use(self) -> None:
        """A group is about to be used, and others prefetched: reductions that all ranks start
        before that start now.
        """
        if self._is_open:
            if self._places is not None and self._has_places:
                while (
                    self._started < len(self._order)
                    and self._places[self._order[self._started]] <= self._uses
                ):
                    self._start_next()
            self._uses += 1

    def collect(self, group: ParamGroup, index: int) -> bool:
        """Take the gradient of the group's parameter number `index`; whether the group has all of
        its gradients now.
        """
        self._reducer.collect(group, index)
        self._collected[group].add(index)
        return self.is_complete(group)

    def is_complete(self, group: ParamGroup) -> bool:
        return len(self._collected[group]) == len(group.params)

    def complete(self, group: ParamGroup) -> None:
        """The group has all of its gradients: its reduction starts as soon as those before it have
        started.
        """
        self._complete[group] = self._uses
        while self._started < len(self._order) and self._may_start(self._order[self._started]):
            self._start_next()

    def _may_start(self, group: ParamGroup) -> bool:
        if group in self._absent:
            return True
        if group not in self._complete or not self._has_places:
            return group in self._complete
        return not self._has_leaves if self._places is None else self._places[group] <= self._uses

    def _start_next(self) -> None:
        if self._order[self._started] not in self._absent:
            self._reducer.reduce(self._order[self._started])
        self._started += 1

    def missing(self) -> Iterator[str]:
        """Names of the trainable parameters without a gradient in this backward."""
        for group in (group for group in self._order if group not in self._absent):
            for i, name in enumerate(group.param_names):
                if group.params[i].requires_grad and i not in self._collected[group]:
                    yield name

    def finish(self) -> None:
        """The backward is over: reduce the rest, the same groups in the same order on every rank,
        and wait.
        """
        again = [
            group for group in self._order[: self._started] if self._reducer.has_pending(group)
        ]
        for group in self._order[self._started :] + again:
            if group not in self._absent:
                self._reducer.reduce(group)
        self._agree()
        self._reducer.end_backward()

    def _agree(self) -> None:
        """After backward 1, 2, 4, 8, ...: take over rank 0's order and places. See the notes."""
        self._backwards += 1
        if self._comm.world_size > 1 and self._backwards & (self._backwards - 1) == 0:
            places = {
                group: place for group, place in self._complete.items() if group not in self._last
            }
            rest = [group for group in self._order if group not in places]
            places |= {group: sys.maxsize if group in self._last else self._uses for group in rest}
            numbers = {group: i for i, group in enumerate(self._groups)}
            told = torch.tensor(
                [[numbers[group], place] for group, place in places.items()],
                device=self._comm.device,
            )
            self._comm.broadcast(told, src=0)
            self._places = {self._groups[i]: place for i, place in told.tolist()}
            self._order = list(self._places)
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of a backward that is over, or that ended in an exception."""
        self._complete.clear()
        self._started = 0
        self._is_open = False
        for collected in self._collected.values():
            collected.clear()
