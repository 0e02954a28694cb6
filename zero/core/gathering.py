"""When to unshard which group: carries out the schedule's decisions on the groups of one engine.

With several ranks, no decision depends on whether a transfer or an update has finished: all ranks
must start the same all-gathers in the same order. So nothing depends on which gradients a rank has
either, because ranks may use different experts: `free_early` frees memory, and changes no decision.

[Note: reads] A parameter may be read in another module's forward (`self.embedding.weight`), in a
loss after the model's forward, or may be returned by its module. Its group is then unsharded and
stays so until as many backwards have ended as there were forwards, because it is unknown which
backward still needs it. Between passes such a read is an error, because a rank may read
alone, and its all-gather would then wait for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack

from zero.comm.communicator import Communicator
from zero.core.forward_writes import ForwardWrites
from zero.core.param_group import ParamGroup, State
from zero.core.reduction import ReductionOrder
from zero.core.schedule import PassRecorder, Residency, Schedule
from zero.errors import UsageError


@dataclass(eq=False, repr=False)
class Gathering:
    """Unshards groups before their use and reshards them after it, by `schedule`.

    Persistent groups are left alone.

    Args:
        groups: all of the model, by position in the schedule.
        comm: of all ranks.
        residency: counts what is gathered.
        reductions: told when a group is about to be used, before any all-gather that this starts.
        writes: keeps what a forward writes to the weights.

    Attributes:
        uses: `unshard` has been called so many times more than `release`.
        recorder: records what is done here.
    """

    _groups: Sequence[ParamGroup]
    _schedule: Schedule
    _comm: Communicator
    _residency: Residency
    _reductions: ReductionOrder
    _writes: ForwardWrites | None = None

    def __post_init__(self) -> None:
        self._position = {group: i for i, group in enumerate(self._groups)}
        self._uses_of: Counter[ParamGroup] = Counter()
        self.uses = 0
        # See `free_early`.
        self._freed: set[ParamGroup] = set()
        self.recorder = PassRecorder()

    def begin_pass(self, kind: Hashable, wraps: bool, trains: bool = False) -> None:
        """Begin a pass of `kind`.

        `wraps`: parameters do not change before the next pass of this kind. `trains`: a backward
        is to follow.
        """
        self._schedule.begin(kind, wraps)
        if self._writes is not None:
            self._writes.begin_pass(trains)

    @property
    def in_pass(self) -> bool:
        """Whether a pass is being recorded."""
        return self._schedule.records

    def end_pass(self, has_trained: bool = False) -> None:
        """The pass is over: reshard what was prefetched and not used. `has_trained`: it ended with
        a backward.
        """
        self._schedule.end()
        for group in self._groups:
            if group.state is State.GATHERING:
                group.reshard()
        if self._writes is not None:
            self._writes.end_pass(has_trained)
        self.recorder.done.append((self.end_pass, (has_trained,)))

    def unshard(self, group: ParamGroup) -> None:
        """The group is used from now on: its parameters show their values.

        The groups that come next are prefetched.
        """
        if group.persistent:
            return
        if group.state is not State.UNSHARDED and _in_gradient_transform():
            raise UsageError(
                f"{group} is sharded, and cannot be gathered inside of torch.func.grad, jvp or a "
                "transform built on them: use torch.autograd.grad, or call the transform inside of "
                "the module's forward, where its weights are available"
            )
        self._visit(group)
        self._show(group)

    def _visit(self, group: ParamGroup) -> None:
        self.before_part(group)
        self._comm.clock.progress.advance(len(self._groups))
        self._schedule.visit(self._position[group])
        self.recorder.done.append((self._visit, (group,)))

    def _show(self, group: ParamGroup) -> None:
        if group.state is State.SHARDED:
            self._make_room(group.layout.numel)
            group.all_gather(group.training_comm)
        self._prefetch()
        group.unshard()
        if self._writes is not None and self._writes.compares:
            self._writes.shown(group)
        self._uses_of[group] += 1
        self.uses += 1
        self.recorder.done.append((self._show, (group,)))

    def release(self, group: ParamGroup) -> None:
        """One use of the group is over.

        After the last one it is resharded, unless the schedule keeps it.
        """
        if group.persistent:
            return
        self._end_use(group)
        self._uses_of[group] -= 1
        self.uses -= 1
        if group in self._freed:
            self._freed.remove(group)
        elif group.release() and not self._schedule.keep(self._position[group], self._live()):
            group.reshard()
        self.recorder.done.append((self.release, (group,)))

    def free_early(self, group: ParamGroup) -> None:
        """This rank needs the group no more, but others may: free the memory before `release`, if
        no rank will keep the group. Until then, decisions count it as gathered.
        """
        if group.users == 1 and not self._schedule.may_keep(self._position[group]):
            self._end_use(group)
            self._freed.add(group)
            group.release()
            group.reshard()

    def _end_use(self, group: ParamGroup) -> None:
        # A context of the script may hold the group beyond the last use here.
        last = self._uses_of[group] == 1 and group not in self._freed
        if last and self._writes is not None:
            self._writes.end_use(group)

    def _live(self) -> int:
        """Gathered elements as all ranks count them."""
        return self._residency.live + sum(group.layout.numel for group in self._freed)

    def release_all_but(self, kept: Collection[ParamGroup]) -> None:
        """End all uses. Each group in `kept` keeps one."""
        for group in self._groups:
            while self._uses_of[group] > (group in kept):
                self.release(group)

    def before_part(self, group: ParamGroup) -> None:
        """`group` is about to be used, or a part of it to be gathered outside of its buffer."""
        if self._reductions.is_open:
            self._reductions.before_use()
        self._comm.watchdog.set_position(group)

    def _prefetch(self) -> None:
        in_flight = 0
        for i in self._schedule.upcoming():
            group = self._groups[i]
            if group.state is State.SHARDED and group not in self._freed:
                if not self._schedule.may_prefetch(i, in_flight, self._live()):
                    return
                # With several ranks `all_gather` waits for the update, because all ranks must
                # make the same decision.
                if not group.is_ready and self._comm.world_size == 1:
                    return
                group.all_gather(group.training_comm)
            if group.state is State.GATHERING:
                in_flight += group.layout.numel
            if in_flight >= self._schedule.prefetch_bucket_size:
                return

    def _make_room(self, numel: int) -> None:
        """Reshard groups that are not in use until `numel` more elements fit, beginning with the
        one that is needed last.
        """
        limit = self._schedule.max_live_parameters
        if self._live() + numel <= limit:
            return
        idle = [
            i
            for i, group in enumerate(self._groups)
            if group.users == 0 and group.state is State.GATHERED
        ]
        for i in sorted(idle, key=self._schedule.distance, reverse=True):
            if self._live() + numel <= limit:
                return
            self._groups[i].reshard()


class OutsideReads:
    """Holds the groups of parameters that were read outside of their modules' calls."""

    def __init__(self, gathering: Gathering):
        self._gathering = gathering
        self.held: set[ParamGroup] = set()
        # In the order of the first read. No call of a module shows when a backward needs these
        # groups.
        self._needed_in_backward: dict[ParamGroup, None] = {}
        # Likewise, but only of graphs whose backward has not ended.
        self._in_graphs: dict[ParamGroup, None] = {}

    def hold(self, group: ParamGroup) -> None:
        """Unshard the group until `release`."""
        if torch.is_grad_enabled():
            self._needed_in_backward[group] = None
        self._hold(group)

    def hold_for_graph(self, group: ParamGroup) -> None:
        """The same for a group whose weights a graph has saved, and again for its backward."""
        self._in_graphs[group] = None
        self._hold(group)

    def _hold(self, group: ParamGroup) -> None:
        if group not in self.held:
            self._gathering.unshard(group)
            self.held.add(group)

    def begin_backward(self) -> None:
        """Hold all groups that any forward has read this way: the backward may need them at any
        moment.
        """
        for group in list(self._needed_in_backward):
            self.hold(group)
        for group in self._in_graphs:
            self._hold(group)

    def end_backwards(self) -> None:
        """No graph waits for its backward any more."""
        self._in_graphs.clear()

    def release(self) -> None:
        for group in sorted(self.held, key=lambda group: group.serial):
            self._gathering.release(group)
        self.held.clear()


def _in_gradient_transform() -> bool:
    """Whether this call is inside of a transform of torch.func other than vmap, such as grad."""
    return peek_interpreter_stack() is not None and any(
        transform.key() != TransformType.Vmap for transform in get_interpreter_stack() or ()
    )
