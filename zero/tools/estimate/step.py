"""What a rank holds at the moments of a step: `zero estimate` asks for the fullest one.

The engine's own policy decides what is gathered (`zero/core/gathering.py`), on groups that move
nothing. What is live besides was found with fake tensors (`activation_trace.py`). Gradients:
`gradients.py`, messages: `messages.py`."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from torch import nn

from zero.build import make_schedule
from zero.config import Config
from zero.core.gathering import Gathering
from zero.core.layout import GroupLayout, GroupPlan
from zero.core.param_group import State
from zero.core.schedule import Residency
from zero.tools.estimate.activation_trace import Moment
from zero.tools.estimate.buffers import Staging
from zero.tools.estimate.gradients import SUMS, Gradients
from zero.tools.estimate.messages import Extra, of_gather
from zero.tools.estimate.states import DISK, Kept

# Parts of device memory: in the optimizer's step; in all-gathers and reductions of codes.
WHOLE, TILES, CODES = (
    "whole tensors of the optimizer",
    "temporary tensors of the optimizer",
    "codes of quantization",
)
# As much of a communicator as `Gathering` sees.
NO_COMMUNICATOR = SimpleNamespace(
    watchdog=SimpleNamespace(set_position=lambda group: None),
    clock=SimpleNamespace(progress=SimpleNamespace(advance=lambda total: None)),
    world_size=2,
)


class CountedGroup:
    """As much of a group as `Gathering` sees: it counts all-gathers in `gathers`, and moves
    nothing.
    """

    def __init__(self, layout: GroupLayout, persistent: bool, residency: Residency):
        self.layout = layout
        self.persistent = persistent
        self.residency = residency
        self.state = State.SHARDED
        self.users = 0
        self.is_ready = True
        self.gathers = 0

    def all_gather(self, by: object) -> None:
        self.state = State.GATHERING
        self.gathers = self.gathers + 1
        self.residency.add(self.layout.numel)

    def unshard(self) -> None:
        self.state = State.UNSHARDED
        self.users = self.users + 1

    def release(self) -> bool:
        self.users -= 1
        if not self.users:
            self.state = State.GATHERED
        return not self.users

    def reshard(self) -> None:
        self.state = State.SHARDED
        self.residency.remove(self.layout.numel)


class FollowedGroup(CountedGroup):
    """A group that tells `memory` of its messages, and takes buffers where its shard is in a file.

    Attribute `is_exact`: a second shard has the values, which are sent as they are.
    """

    def __init__(
        self, kept: Kept, persistent: bool, config: Config, memory: StepMemory, staging: Staging
    ):
        super().__init__(kept.layout, persistent, memory.residency)
        self.trainable = kept.trainable
        self._memory = memory
        self._extra = of_gather(kept, config)
        self._messages = Extra()
        self._staging = staging if kept.home.weights == DISK else None
        self._buffer = 0
        self._nbytes = kept.layout.shard_numel * config.compute_dtype.itemsize
        self.is_exact = False

    def all_gather(self, by: object) -> None:
        super().all_gather(by)
        if self._staging is not None:
            self._buffer = self._staging.take(self._nbytes)
        self._messages = Extra() if self.is_exact else self._extra
        self._memory.messages += self._messages.held
        self._memory.look(self._messages.start)

    def unshard(self) -> None:
        self._end_gather()
        super().unshard()

    def reshard(self) -> None:
        self._end_gather()
        super().reshard()

    def _end_gather(self) -> None:
        if self.state is not State.GATHERING:
            return
        if self._staging is not None:
            self._staging.copy_in(self._buffer)
        self._memory.look(self._messages.end)
        self._memory.messages -= self._messages.held
        self.is_exact = self._memory.has_second_shards


def imagined(model: nn.Module, plans: Sequence[GroupPlan]) -> list[Moment]:
    """The moments of a forward that calls the modules as they were made, and of its backward,
    without activations.
    """
    owned: dict[nn.Module, list[nn.Parameter]] = {}
    for plan in plans:
        for module in plan.modules:
            owned.setdefault(module, []).extend(plan.params)
    called = [module for module in model.modules() if module in owned]
    found = [Moment(kind, module, 0, 0) for module in called for kind in ("enter", "leave")]
    last = {
        param: module for module in reversed(called) for param in owned[module]
    }  # which runs backwards
    for module in reversed(called):
        found.append(Moment("backward", module, 0, 0))
        found += [
            Moment("gradient", param, 0, 0) for param in owned[module] if last[param] is module
        ]
    return found


class StepMemory:
    """Follows the moments of a step. Args: gathers: whether parameters are gathered for use;
    staging: buffers of files.

    Attributes: gathers: how often each group is gathered in a step, known after `peak`. messages:
    bytes of codes of parameters, now; most_messages: at most. has_second_shards: so that only a
    step's first all-gather sends codes."""

    def __init__(
        self,
        kept: Sequence[Kept],
        config: Config,
        world_size: int,
        gathers: bool,
        staging: Staging,
    ):
        self._kept = kept
        self._config = config
        self._world_size = world_size
        self._staging = staging
        self._plans = [group.plan for group in kept]
        self.residency = Residency()
        self.gathers = [0] * len(kept)
        self.has_second_shards = config.zero_optimization.second_shards_over(world_size) > 0
        self.messages = self.most_messages = self._live = 0
        self._gradients = self._start_backward()
        self._most: dict[str, int] = {}
        self._groups = [
            FollowedGroup(group, group.plan.persistent or not gathers, config, self, staging)
            for group in kept
        ]
        schedule = make_schedule(self._groups, config)
        self._gathering = Gathering(
            self._groups, schedule, NO_COMMUNICATOR, self.residency, before_use=lambda: None
        )
        self._actions = {
            "enter": self._enter, "leave": self._leave, "backward": self._backward, "gradient": self._gradient,
            "end": lambda moment: None,
        }  # fmt: skip
        self._owning_group = {
            param: number for number, plan in enumerate(self._plans) for param in plan.params
        }
        self._used_by: dict[nn.Module | None, list[int]] = {}
        for number, plan in enumerate(self._plans):
            for module in plan.modules:
                self._used_by.setdefault(module, []).append(number)

    def peak(
        self, moments: Sequence[Moment], gradients: int, in_step: dict[str, int]
    ) -> dict[str, int]:
        """The parts at the fullest moment.

        Args, in bytes: gradients: that are kept on the device after backward; in_step: what the
        step takes besides."""
        self._follow(moments)  # the first pass is only recorded
        self.gathers = [0] * len(self._groups)
        zero, micro_batches = (
            self._config.zero_optimization,
            self._config.gradient_accumulation_steps or 1,
        )
        most: dict[str, int] = {}
        for number in range(min(3, micro_batches)):  # all between the first and the last are alike
            before, last = (
                [group.gathers for group in self._groups],
                number == min(3, micro_batches) - 1,
            )
            later, whole_sums = number > 0, zero.stage < 2
            found = self._follow(
                moments,
                not last,
                later and not whole_sums,
                later and whole_sums,
                whole_sums and not last,
            )
            most = max(most, found, key=_total)
            alike = micro_batches - 2 if number == 1 and not last else 1
            for place, group in enumerate(self._groups):
                self.gathers[place] += (group.gathers - before[place]) * alike
        in_step = {"gradients": gradients} | in_step
        return max(most, in_step, key=_total)

    @property
    def most_gathered(self) -> int:
        """Most elements that were gathered at once so far."""
        return self.residency.peak

    def _follow(
        self, moments: Sequence[Moment], wraps: bool = False, *gradients: bool
    ) -> dict[str, int]:
        """Follow one pass. `wraps`: parameters do not change after it, so that gathered ones may be
        kept.

        gradients: adds, sums and keeps, as for `Gradients`.
        """
        self._gradients = self._start_backward(*gradients)
        self._left = [len(plan.params) for plan in self._plans]
        self._in_backward: set[int] = set()
        self._most: dict[str, int] = {}
        self._gathering.begin_pass("train", wraps)
        for moment in moments:
            self._live = moment.peak
            self.look()
            self._live = moment.live
            self._actions[moment.kind](moment)
        self._release(self._in_backward.copy())
        self._gradients.end()
        self._gathering.end_pass()
        for group in self._groups:
            if group.state is State.GATHERED and not wraps:
                group.reshard()
            group.is_exact = group.is_exact and (wraps or not group.trainable)
        return self._most

    def _start_backward(self, adds: bool = False, *sums: bool) -> Gradients:
        return Gradients(
            self._config, self._kept, self._world_size, self._staging, self.look, adds, *sums
        )

    def look(self, temporary: int = 0) -> None:
        """Compare what is held now with the most so far.

        Args: temporary: bytes that codes take besides.
        """
        self.most_messages = max(self.most_messages, self.messages + temporary)
        now = {
            "activations": self._live,
            "gathered parameters": self.residency.live * self._config.compute_dtype.itemsize,
            CODES: self.messages + temporary,
            "gradients on their way": self._gradients.moving,
            "gradients": self._gradients.kept,
            SUMS: self._gradients.sums,
        }
        self._most = max(self._most, now, key=_total)

    def _enter(self, moment: Moment) -> None:
        for number in self._used_by.get(moment.what, ()):
            self._gathering.unshard(self._groups[number])

    def _leave(self, moment: Moment) -> None:
        for number in self._used_by.get(moment.what, ()):
            self._gathering.release(self._groups[number])

    def _backward(self, moment: Moment) -> None:
        if isinstance(moment.what, nn.Embedding):
            return
        self._release({number for number in self._in_backward if self._plans[number].shared})
        for number in self._used_by.get(moment.what, ()):
            if self._left[number] and number not in self._in_backward:
                self._in_backward.add(number)
                self._gathering.unshard(self._groups[number])

    def _gradient(self, moment: Moment) -> None:
        number = self._owning_group[moment.what]
        self._left[number] -= 1
        self._gradients.collect(moment.what.numel())
        if self._left[number] == 0:
            self._release({number} & self._in_backward)
            self._gradients.flatten(number)
            self.look()
            self._gradients.reduce(number)

    def _release(self, numbers: set[int]) -> None:
        for number in numbers:
            self._in_backward.discard(number)
            self._gathering.release(self._groups[number])


def _total(parts: dict[str, int]) -> int:
    return sum(parts.values())
