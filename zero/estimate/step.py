"""What a rank holds at the moments of a step: `zero estimate` asks for the fullest one.

The engine's own policy decides what is gathered (`zero/gathering.py`), on units that move nothing. What is live besides
was found with fake tensors (`activation_trace.py`). When gradients are reduced: as in `zero/gradients.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace

from torch import nn

from zero.config import Config
from zero.construction import make_schedule
from zero.estimate.activation_trace import Moment
from zero.estimate.buffers import Staging
from zero.estimate.states import DISK, Kept
from zero.gathering import Gathering
from zero.layout import UnitLayout, UnitPlan
from zero.schedule import Residency
from zero.unit import State

# A part of device memory, in the step.
WHOLE = "whole tensors of the optimizer"
# As much of a communicator as `Gathering` sees.
NO_COMMUNICATOR = SimpleNamespace(
    watchdog=SimpleNamespace(set_position=lambda unit: None),
    clock=SimpleNamespace(progress=SimpleNamespace(advance=lambda total: None)),
    world_size=2,
)


class CountedUnit:
    """As much of a unit as `Gathering` sees: it counts all-gathers in `gathers`, and moves nothing.

    Args: staging: through which its shard of `nbytes` is read, if that is in a file.
    """

    def __init__(
        self,
        layout: UnitLayout,
        persistent: bool,
        residency: Residency,
        staging: Staging | None = None,
        nbytes: int = 0,
    ):
        self.layout, self.persistent, self.residency = layout, persistent, residency
        self._staging, self._nbytes, self._buffer = staging, nbytes, 0
        self.state, self.users, self.is_ready, self.gathers = State.SHARDED, 0, True, 0

    def all_gather(self, by: object) -> None:
        self.state, self.gathers = State.GATHERING, self.gathers + 1
        self.residency.add(self.layout.numel)
        if self._staging is not None:
            self._buffer = self._staging.take(self._nbytes)

    def unshard(self) -> None:
        self._end_read()
        self.state, self.users = State.UNSHARDED, self.users + 1

    def _end_read(self) -> None:
        if self._staging is not None and self.state is State.GATHERING:
            self._staging.copy_in(self._buffer)

    def release(self) -> bool:
        self.users -= 1
        if not self.users:
            self.state = State.GATHERED
        return not self.users

    def reshard(self) -> None:
        self._end_read()
        self.state = State.SHARDED
        self.residency.remove(self.layout.numel)


def imagined(model: nn.Module, plans: Sequence[UnitPlan]) -> list[Moment]:
    """The moments of a forward that calls the modules as they were made, and of its backward, without activations."""
    owned: dict[nn.Module, list[nn.Parameter]] = {}
    for plan in plans:
        for module in plan.modules:
            owned.setdefault(module, []).extend(plan.params)
    called = [module for module in model.modules() if module in owned]
    found = [Moment(kind, module, 0, 0) for module in called for kind in ("enter", "leave")]
    last = {param: module for module in reversed(called) for param in owned[module]}  # which runs backwards
    for module in reversed(called):
        found.append(Moment("backward", module, 0, 0))
        found += [Moment("gradient", param, 0, 0) for param in owned[module] if last[param] is module]
    return found


SUMS = "sums of micro-batches"  # at stages 0 and 1, in whole units


class _Gradients:
    """Bytes of gradients that one backward makes, on the device of one rank, until their reduction has ended.

    Args: adds: to those of earlier micro-batches; sums: of those there are sums in whole units, not reduced yet; keeps:
    this backward's gradients are added to these sums, and not reduced.
    """

    def __init__(
        self,
        config: Config,
        units: Sequence[Kept],
        world_size: int,
        staging: Staging,
        adds: bool,
        sums: bool = False,
        keeps: bool = False,
    ):
        zero, self._keeps, self._sum_item = config.zero_optimization, keeps, config.sum_dtype.itemsize
        self._has_sums, self._flat = sums, 0
        self.sums = sum(self._sum_of(unit) for unit in units if unit.trainable) if sums else 0
        self._units, self._world_size, self._staging, self._adds = units, world_size, staging, adds
        self._item, self._kept_item = config.compute_dtype.itemsize, config.gradient_bytes(sums_have_16_bits=True)
        unasked = config.sum_dtype if sums else config.compute_dtype
        self._sent_item = ((world_size > 1 and config.communication_data_type) or unasked).itemsize
        self._bucket = zero.reduce_bucket_size if zero.overlap_comm else 0
        self._in_flight: deque[Kept] = deque()
        self._leaving: deque[tuple[Kept, int]] = deque()
        self.apart = self.kept = 0

    def _sum_of(self, unit: Kept) -> int:
        return unit.layout.padded * self._sum_item

    def collect(self, numel: int) -> None:
        self.apart += numel * self._item

    def flatten(self, number: int) -> None:
        """Gradients of a unit are copied to a flat buffer, which is about to be reduced, or added to the sums."""
        unit = self._units[number]
        if self._keeps:
            self._flat = unit.layout.padded * self._item
            return
        if self._has_sums:  # the sum is what is reduced; in another dtype, there are both for a moment
            self.sums -= self._sum_of(unit)
            self._flat = self._sum_of(unit) if self._sent_item != self._sum_item else 0
        if self._adds and _is_in_file(unit):
            self._staging.copy_in(self._staging.take(unit.gradient))
        self._in_flight.append(unit)
        while len(self._in_flight) > 1 and sum(each.layout.padded for each in self._in_flight) > self._bucket:
            self._finish_oldest()

    def reduce(self, number: int) -> None:
        """The copies' originals are free."""
        unit = self._units[number]
        self.apart -= unit.layout.numel * self._item
        self._flat = 0
        if self._keeps:
            self.sums += 0 if self._has_sums else self._sum_of(unit)
            return
        if not unit.offloaded:
            self.kept += unit.gradient
        if self._world_size == 1 or not self._bucket:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        unit = self._in_flight.popleft()
        if unit.offloaded:
            self._leave(most=1)
            self._leaving.append((unit, self._staging.take(unit.gradient) if _is_in_file(unit) else 0))

    def _leave(self, most: int) -> None:
        """Wait until at most so many are on their way from the device."""
        while len(self._leaving) > most:
            if buffer := self._leaving.popleft()[1]:
                self._staging.give([buffer])

    def end(self) -> None:
        while self._in_flight:
            self._finish_oldest()
        self._leave(most=0)

    @property
    def moving(self) -> int:
        """Bytes that are not kept: gradients apart, flat buffers, and results in another dtype or on another tier."""
        differs = self._sent_item if self._sent_item != self._kept_item else 0
        flying = sum(
            each.layout.padded * self._sent_item + each.layout.shard_numel * differs + each.gradient * each.offloaded
            for each in self._in_flight
        )
        return self.apart + self._flat + flying + sum(unit.gradient for unit, _ in self._leaving)


def _is_in_file(unit: Kept) -> bool:
    return unit.place(unit.gradient) == DISK


class StepMemory:
    """Follows the moments of a step. Args: gathers: whether parameters are gathered for use; staging: buffers of files.

    Attributes: gathers: how often each unit is gathered in a step, known after `peak`.
    """

    def __init__(
        self,
        kept: Sequence[Kept],
        config: Config,
        world_size: int,
        gathers: bool,
        staging: Staging,
    ):
        self._kept, self._config, self._world_size, self._staging = kept, config, world_size, staging
        self._plans, self._residency, self.gathers = [unit.plan for unit in kept], Residency(), [0] * len(kept)
        self._units = [
            CountedUnit(
                unit.layout,
                unit.plan.persistent or not gathers,
                self._residency,
                staging if unit.home.weights == DISK else None,
                unit.layout.shard_numel * config.compute_dtype.itemsize,
            )
            for unit in kept
        ]
        schedule = make_schedule(self._units, config)
        self._gathering = Gathering(self._units, schedule, NO_COMMUNICATOR, self._residency, before_use=lambda: None)
        self._actions = {
            "enter": self._enter, "leave": self._leave, "backward": self._backward, "gradient": self._gradient,
            "end": lambda moment: None,
        }  # fmt: skip
        self._unit_of = {param: number for number, plan in enumerate(self._plans) for param in plan.params}
        self._used_by: dict[nn.Module | None, list[int]] = {}
        for number, plan in enumerate(self._plans):
            for module in plan.modules:
                self._used_by.setdefault(module, []).append(number)

    def peak(self, moments: Sequence[Moment], gradients: int, whole: int) -> dict[str, int]:
        """The parts at the fullest moment.

        Args, in bytes: gradients: that are kept on the device after backward; whole: tensors on their owners in a step.
        """
        self._follow(moments)  # the first pass is only recorded
        self.gathers = [0] * len(self._units)
        zero, micro_batches = self._config.zero_optimization, self._config.gradient_accumulation_steps or 1
        most: dict[str, int] = {}
        for number in range(min(3, micro_batches)):  # all between the first and the last are alike
            before, last = [unit.gathers for unit in self._units], number == min(3, micro_batches) - 1
            later, whole_sums = number > 0, zero.stage < 2
            found = self._follow(
                moments, not last, later and not whole_sums, later and whole_sums, whole_sums and not last
            )
            most = max(most, found, key=_total)
            alike = micro_batches - 2 if number == 1 and not last else 1
            for place, unit in enumerate(self._units):
                self.gathers[place] += (unit.gathers - before[place]) * alike
        in_step = {"gradients": gradients, WHOLE: whole}
        if zero.stage >= 2 and micro_batches > 1:
            most["gradients"] = gradients  # they hold the sums so far
        return max(most, in_step, key=_total)

    @property
    def most_gathered(self) -> int:
        """Most elements that were gathered at once so far."""
        return self._residency.peak

    def _follow(self, moments: Sequence[Moment], wraps: bool = False, *gradients: bool) -> dict[str, int]:
        """Follow one pass. `wraps`: parameters do not change after it, so that gathered ones may be kept.

        gradients: adds, sums and keeps, as for `_Gradients`.
        """
        self._gradients = _Gradients(
            self._config, self._kept, self._world_size, self._staging, *(gradients or (False,))
        )
        self._left = [len(plan.params) for plan in self._plans]
        self._in_backward: set[int] = set()
        self._most: dict[str, int] = {}
        self._gathering.begin_pass("train", wraps)
        for moment in moments:
            self._look(moment.peak)
            self._actions[moment.kind](moment)
        self._release(self._in_backward.copy())
        self._gradients.end()
        self._gathering.end_pass()
        for unit in self._units:
            if unit.state is State.GATHERED and not wraps:
                unit.reshard()
        return self._most

    def _look(self, activations: int) -> None:
        now = {
            "activations": activations,
            "gathered parameters": self._residency.live * self._config.compute_dtype.itemsize,
            "gradients on their way": self._gradients.moving,
            "gradients": self._gradients.kept,
            SUMS: self._gradients.sums,
        }
        self._most = max(self._most, now, key=_total)

    def _enter(self, moment: Moment) -> None:
        for number in self._used_by.get(moment.what, ()):
            self._gathering.unshard(self._units[number])

    def _leave(self, moment: Moment) -> None:
        for number in self._used_by.get(moment.what, ()):
            self._gathering.release(self._units[number])

    def _backward(self, moment: Moment) -> None:
        if isinstance(moment.what, nn.Embedding):
            return
        self._release({number for number in self._in_backward if self._plans[number].shared})
        for number in self._used_by.get(moment.what, ()):
            if self._left[number] and number not in self._in_backward:
                self._in_backward.add(number)
                self._gathering.unshard(self._units[number])

    def _gradient(self, moment: Moment) -> None:
        number = self._unit_of[moment.what]
        self._left[number] -= 1
        self._gradients.collect(moment.what.numel())
        if self._left[number] == 0:
            self._release({number} & self._in_backward)
            self._gradients.flatten(number)
            self._look(moment.live)
            self._gradients.reduce(number)

    def _release(self, numbers: set[int]) -> None:
        for number in numbers:
            self._in_backward.discard(number)
            self._gathering.release(self._units[number])


def _total(parts: dict[str, int]) -> int:
    return sum(parts.values())
