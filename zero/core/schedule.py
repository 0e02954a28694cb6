"""What follows from a recorded pass: what to prefetch, keep and reshard in the next one
(`Schedule`, where groups are numbers, and sizes are elements), and what is left of it for a rank
that can no longer compute (`PassRecorder`).

[Note: schedule] A *pass* is the forward and backward of one micro-batch, or one forward without
gradients. Each use of a group in a pass is a *visit*. The first pass of a kind is only recorded.
From then on the recorded order predicts the next visits:

    visit(a)    ->  prefetch b, c, ... while fewer than `prefetch_bucket_size` elements are in
                flight
    release(a)  ->  keep if a's next visit is at most `max_reuse_distance` elements away and no
                more than
                    `max_live_parameters` elements are gathered; reshard otherwise

If a pass deviates from the recorded order (a dropped layer, another branch), nothing is predicted
until the next pass, which follows the new order. All inputs are the same on every rank, so every
rank makes the same decisions.

[Note: replay] A rank that can no longer compute would leave the others waiting for its shards and
gradients. From the recording of an earlier pass of the same kind it can replay the rest without
computing: its policies make the same decisions as those of the other ranks, and start the same
collectives.

An action that fails half-way, for example because there is no memory for a buffer, must be
repeatable. A policy therefore records what it has done only once nothing can fail any more."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from zero.comm.fingerprint import NamedGroup

Action = tuple[Callable[..., None], tuple[object, ...]]

NEVER = float("inf")


@dataclass
class Residency:
    """Counts gathered elements: `persistent` ones separately; for all others, `live` now and `peak`
    so far.
    """

    persistent: int = 0
    live: int = 0
    peak: int = 0

    def add(self, numel: int) -> None:
        self.live += numel
        self.peak = max(self.peak, self.live)

    def remove(self, numel: int) -> None:
        self.live -= numel


class Plan:
    """A recorded order of visits.

    Attributes:
        distances: for each position, the elements that are used before the group's next visit: if
            an equal pass follows (True), or only in this pass (False).
    """

    def __init__(self, order: Sequence[int], sizes: Sequence[int]):
        self.order = tuple(order)
        self.distances = {
            False: list(_distances(order, sizes)),
            True: list(_distances((*order, *order), sizes))[: len(order)],
        }


def _distances(order: Sequence[int], sizes: Sequence[int]) -> Iterable[float]:
    """For each position, the elements of the visits between it and the group's next one."""
    before = [0, *accumulate(map(sizes.__getitem__, order))]
    following: dict[int, int] = {}
    found = []
    for position in reversed(range(len(order))):
        there = following.get(order[position])
        found.append(NEVER if there is None else before[there] - before[position + 1])
        following[order[position]] = position
    return reversed(found)


@dataclass(eq=False, repr=False)
class Schedule:
    """Follows the visits of a pass and answers what to prefetch and whether to keep.

    Args (all in elements): sizes: of each group, by index; prefetch_bucket_size,
    max_live_parameters and max_reuse_distance: like the settings `stage3_*` of the same names."""

    sizes: Sequence[int]
    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int

    def __post_init__(self) -> None:
        self.plans: dict[Hashable, Plan] = {}
        self._plan: Plan | None = None
        self._kind: Hashable = None
        self._trace: list[int] | None = None
        self._last_position = [-1] * len(self.sizes)
        self.wraps = False

    def limit_live_parameters(self, most: int) -> None:
        """From now on, at most `most` elements are gathered at a time, if the limit is not lower
        already.
        """
        self.max_live_parameters = min(self.max_live_parameters, most)

    def begin(self, kind: Hashable, wraps: bool) -> None:
        """Start a pass of `kind`.

        `wraps` says that parameters do not change before the next pass of this kind.
        """
        self._kind = kind
        self.wraps = wraps
        self._plan = self.plans.get(kind)
        self._trace = []
        self._last_position = [-1] * len(self.sizes)

    def end(self) -> None:
        """Finish the pass; a new order replaces the recorded one."""
        if self._trace and (self._plan is None or self._plan.order != tuple(self._trace)):
            self.plans[self._kind] = Plan(self._trace, self.sizes)
        self._plan = None
        self._trace = None

    @property
    def records(self) -> bool:
        """Whether a pass is under way."""
        return self._trace is not None

    def visit(self, group: int) -> None:
        """Record that `group` is used now."""
        if self._trace is None:
            return
        position = len(self._trace)
        self._trace.append(group)
        self._last_position[group] = position
        plan = self._plan
        if plan is not None and plan.order[position : position + 1] != (group,):
            self._plan = None

    def recorded(self, kind: Hashable) -> Sequence[int]:
        """The groups in the order of their visits in the last pass of `kind`; empty before the
        first.
        """
        return self.plans[kind].order if kind in self.plans else ()

    def upcoming(self) -> Sequence[int]:
        """The groups that the recorded order visits next, nearest first."""
        if self._plan is None or self._trace is None:
            return ()
        return self._plan.order[len(self._trace) :]

    def distance(self, group: int) -> float:
        """Elements used between the group's last visit and its next one; infinite when unknown."""
        if self._plan is None or self._last_position[group] < 0:
            return NEVER
        return self._plan.distances[self.wraps][self._last_position[group]]

    def keep(self, group: int, live: int) -> bool:
        """Whether a group whose last use has ended stays gathered.

        `live`: gathered elements, its own included.
        """
        return live <= self.max_live_parameters and self.may_keep(group)

    def may_keep(self, group: int) -> bool:
        """Whether a group stays gathered after its last use if there is room."""
        return self.distance(group) <= self.max_reuse_distance

    def may_prefetch(self, group: int, in_flight: int, live: int) -> bool:
        """Whether an all-gather may start before the group's use.

        `in_flight`: elements of such all-gathers.
        """
        fits = live + self.sizes[group] <= self.max_live_parameters
        return fits and in_flight < self.prefetch_bucket_size


class PassRecorder:
    """Keeps the last complete recording of each kind.

    Attributes:
        done: to which policies append what they have done. Outside of `recording`, nothing is kept.
    """

    def __init__(self) -> None:
        self._recordings: dict[Hashable, list[Action]] = {}
        self._kind: Hashable = None
        self.done: MutableSequence[Action] = deque(maxlen=0)

    @contextmanager
    def recording(self, kind: Hashable) -> Iterator[None]:
        """Context of a forward or backward of `kind`."""
        self._kind, self.done = kind, []
        try:
            yield
        finally:
            self._kind, self.done = None, deque(maxlen=0)

    @property
    def is_recording(self) -> bool:
        return self._kind is not None

    @property
    def can_replay(self) -> bool:
        """Whether a pass of the same kind has completed."""
        return self._kind in self._recordings

    def complete(self) -> None:
        """The forward or backward has ended without an error: keep its recording."""
        self._recordings[self._kind] = list(self.done)

    def replay_rest(self) -> None:
        """Do what this pass has not done yet, as in the last one of the same kind.

        The actions of one object have an order, those of several have none among each other: the
        last gradient of a block may come before or after the next block's gather, and gathers and
        reductions have connections of their own. Raises RuntimeError if this pass has done
        something else so far.
        """
        recorded = self._recordings.get(self._kind, self.done)
        of_recorded, of_done = _by_owner(recorded), _by_owner(self.done)
        if any(of_recorded[each][: len(done)] != done for each, done in of_done.items()):
            raise RuntimeError(
                "this rank ran out of memory, and others may wait for it forever, because this "
                f"{self._kind} runs other modules than the last one"
            )
        rest = list(recorded)
        for done in self.done:
            rest.remove(done)
        for action, args in rest:
            action(*args)

    def names(self) -> dict[Hashable, dict[str, list[tuple[str, list[str]]]]]:
        """Describe the recordings in a form that ranks can compare."""
        return {
            kind: {
                owner: [
                    (action.__name__, [each.name for each in args if isinstance(each, NamedGroup)])
                    for action, args in of_owner
                ]
                for owner, of_owner in _by_owner(actions).items()
            }
            for kind, actions in self._recordings.items()
        }


def _by_owner(actions: Iterable[Action]) -> dict[str, list[Action]]:
    """The actions by the class of the object whose methods they are; an engine has one of each."""
    found: dict[str, list[Action]] = defaultdict(list)
    for each in actions:
        found[type(getattr(each[0], "__self__", None)).__name__].append(each)
    return found
