"""When to unshard which unit: carries out the schedule's decisions on the units of one engine.

This file knows nothing of modules, hooks, gradients or the optimizer. With several ranks, no decision depends on
whether a transfer or an update has finished: all ranks must start the same all-gathers in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence

from zero.comm import Communicator
from zero.schedule import Residency, Schedule
from zero.unit import State, Unit


class Gathering:
    """Unshards units before their use and reshards them after it, by `schedule`.

    Args: units: all of the model, by position in the schedule; comm: gathers their values, and may quantize them;
    residency: counts what is gathered; before_use: called when a unit is about to be used, before any all-gather that
    this starts. Persistent units are left alone.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        comm: Communicator,
        residency: Residency,
        before_use: Callable[[], None],
    ):
        self._units, self._schedule, self._comm, self._residency = list(units), schedule, comm, residency
        self._position = {unit: i for i, unit in enumerate(self._units)}
        self._uses: Counter[Unit] = Counter()
        self._before_use = before_use

    def begin_pass(self, kind: Hashable, wraps: bool) -> None:
        """A pass of `kind` begins; `wraps`: parameters do not change before the next one of this kind."""
        self._schedule.begin(kind, wraps)

    @property
    def in_pass(self) -> bool:
        """Whether a pass is being recorded."""
        return self._schedule.records

    def end_pass(self) -> None:
        """The pass is over: reshard what was prefetched and not used."""
        self._schedule.end()
        for unit in self._units:
            if unit.state is State.GATHERING:
                unit.reshard()

    def unshard(self, unit: Unit) -> None:
        """The unit is used from now on: its parameters show their values. The units that come next are prefetched."""
        if unit.persistent:
            return
        self._before_use()
        self._comm.watchdog.set_position(unit)
        self._comm.clock.progress.advance(len(self._units))
        self._schedule.visit(self._position[unit])
        if unit.state is State.SHARDED:
            self._make_room(unit.layout.numel)
            unit.all_gather(self._comm)
        self._prefetch()
        unit.unshard()
        self._uses[unit] += 1

    def release(self, unit: Unit) -> None:
        """One use of the unit is over. After the last one it is resharded, unless the schedule keeps it."""
        if unit.persistent:
            return
        self._uses[unit] -= 1
        if unit.release() and not self._schedule.keep(self._position[unit], self._residency.live):
            unit.reshard()

    def release_all_but(self, kept: Collection[Unit]) -> None:
        """End all uses. Each unit in `kept` keeps one."""
        for unit in self._units:
            while self._uses[unit] > (unit in kept):
                self.release(unit)

    def before_part(self, unit: Unit) -> None:
        """A part of `unit` is about to be gathered outside of its buffer."""
        self._before_use()
        self._comm.watchdog.set_position(unit)

    def _prefetch(self) -> None:
        in_flight = 0
        for i in self._schedule.upcoming():
            unit = self._units[i]
            if unit.state is State.SHARDED:
                if not self._schedule.may_prefetch(i, in_flight, self._residency.live):
                    return
                # With several ranks `all_gather` waits for the update, because all ranks must decide alike.
                if not unit.is_ready and self._comm.world_size == 1:
                    return
                unit.all_gather(self._comm)
            if unit.state is State.GATHERING:
                in_flight += unit.layout.numel
            if in_flight >= self._schedule.prefetch_bucket_size:
                return

    def _make_room(self, numel: int) -> None:
        """Reshard units that are not in use until `numel` more elements fit; first the one that is needed last."""
        limit = self._schedule.max_live_parameters
        if self._residency.live + numel <= limit:
            return
        idle = [i for i, unit in enumerate(self._units) if unit.users == 0 and unit.state is State.GATHERED]
        for i in sorted(idle, key=self._schedule.distance, reverse=True):
            if self._residency.live + numel <= limit:
                return
            self._units[i].reshard()
