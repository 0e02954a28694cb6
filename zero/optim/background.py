"""When sub-groups are updated, and how those in files are read and written for it.

This file does not know what an update computes.

[Note: late updates] Once norm and overflow are known, the update of a sub-group depends on nothing
but the sub-group. So `step` may return at once. A thread then updates the sub-groups, in the order
in which the next forward needs them. An all-gather waits for its own group only, whose sub-groups
are then updated first. Results equal those of a synchronous step. On an accelerator the thread has
a stream of its own: on the default one its copies would delay the forward's kernels.

[Note: files] Tensors of a sub-group that are in a file are read into host buffers, updated there,
and written back. While one sub-group is updated the next one is read (`pipeline_read`) and the last
one is written (`pipeline_write`). Weights that go from host memory to an accelerator are always
copied while the next sub-group is updated."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable

import torch

from zero.comm.clock import Progress, label
from zero.comm.work import Pending
from zero.core.optimizer_shard import OptimizerShard
from zero.device import beside, compute_stream, is_accelerator, ready_for_thread
from zero.offload.pinned import HostMemory
from zero.optim.subgroups import SubGroup, SubGroupState, is_state_tensor


class SubGroupInMemory:
    """One sub-group with everything in memory that its update needs.

    An update reads `grad` and changes or replaces `master` and `state` (values by the optimizer's
    names). `write` stores them. `is_in_files`: some of it may be in a file.

    Args: buffers: host memory for what is read from files; for_weights: host memory for new values
    in the weights' dtype."""

    def __init__(
        self,
        sub_group: SubGroup,
        state: SubGroupState,
        buffers: HostMemory,
        for_weights: HostMemory,
    ):
        self.sub_group = sub_group
        self._all_state = state
        self._buffers = buffers
        self._for_weights = for_weights
        self._tier = sub_group.shard.tier
        self.is_in_files = self._tier.file is not None or sub_group.group.tier.file is not None
        self._reads: list[Pending] = []
        self._stored = state.state_of(sub_group)
        grad = sub_group.shard.grad
        assert grad is not None, "in a step each shard has a gradient"
        self.grad = self._read(grad[sub_group.start : sub_group.end])
        self.master = self._read(sub_group.master)
        self.state = {
            key: self._read(value) if is_state_tensor(value) else value
            for key, value in self._stored.items()
        }

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a buffer to which it is being read."""
        if not self._tier.holds_in_file(tensor):
            return tensor
        buffer = self._buffers.like(tensor)
        self._reads.append(self._tier.load(buffer, tensor))
        return buffer

    def wait(self) -> None:
        """Block until everything is in memory."""
        for read in self._reads:
            read.wait()

    def weights_target(self) -> torch.Tensor | None:
        """Host memory for the updated values in the weights' dtype: the shard's own if it is there;

        None for fp32, in which the master has them.
        """
        sub_group = self.sub_group
        shard = sub_group.group.shard[sub_group.start : sub_group.end]
        if shard.dtype == torch.float32:
            return None
        in_memory = shard.device.type == "cpu" and not sub_group.group.tier.holds_in_file(shard)
        return shard if in_memory else self._for_weights.take(shard.nbytes).view(shard.dtype)

    def write(self, rounded: Pending) -> Pending:
        """Start to store what the update has changed; `rounded` is the write to the weights.

        If masters are in a file, new state gets a place in it.
        """
        shard, tier, writes, stored = self.sub_group.shard, self._tier, [rounded], {}
        if self.master is not self.sub_group.master:
            writes.append(tier.store(self.sub_group.master, self.master))
        # The whole group counts: each sub-group may be small.
        file = tier.file if tier.puts_in_file(shard.master.nbytes) else None
        for key, value in self.state.items():
            place = self._stored.get(key)
            if not is_state_tensor(value):
                stored[key] = value
                continue
            if not (
                is_state_tensor(place) and tier.holds_in_file(place) and place.dtype == value.dtype
            ):
                place = value if file is None else file.empty(value.numel(), value.dtype)
            if place is not value:
                writes.append(tier.store(place, value))
            stored[key] = place
        self._all_state.put_state(self.sub_group, stored)
        result = Pending(writes)
        shard.add_write(result)
        return result


# Makes the update in memory; the result has the values for the group's weights.
Update = Callable[[SubGroupInMemory], torch.Tensor]


_all: weakref.WeakSet[Updates] = weakref.WeakSet()


@atexit.register
def _drop_all() -> None:
    """At exit the remaining updates are not needed, and no thread may still run when the
    interpreter ends.
    """
    for updates in list(_all):
        updates.drop()


class Updates:
    """Updates sub-groups by a function, now or in a thread.

    Args: device: that computes; read_ahead, write_behind: see the note on files; shows: print the
    progress of slow updates."""

    def __init__(self, device: torch.device, read_ahead: bool, write_behind: bool, shows: bool):
        self._device = device
        self._shows = shows
        self._buffers = HostMemory()
        self._for_weights = HostMemory(pin=is_accelerator(device))
        # Of late updates: always the same one, so that memory which one step frees is used again
        # after it.
        self._stream: torch.Stream | None = None
        # The end of late updates on this stream.
        self._ends: dict[OptimizerShard, torch.Event] = {}
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._todo: deque[SubGroup] = deque()
        self._left: Counter[OptimizerShard] = Counter()
        self._busy = False
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        _all.add(self)

    def run(self, sub_groups: Iterable[SubGroup], state: SubGroupState, update: Update) -> None:
        """Update `sub_groups` before returning."""
        self._plan(sub_groups)
        try:
            self._work(state, update)
        except BaseException as error:
            self.fail(error)
            raise

    def start(self, sub_groups: Iterable[SubGroup], state: SubGroupState, update: Update) -> None:
        """Update `sub_groups` in a thread. The caller has waited for the earlier ones."""
        self._plan(sub_groups)
        if self._left:
            self._busy = True
            args = state, update, ready_for_thread(self._device)
            threading.Thread(
                target=self._work_in_thread, args=args, name="zero optimizer", daemon=True
            ).start()

    def prefer(self, shard: OptimizerShard) -> None:
        """Update the sub-groups of `shard` next: somebody needs them."""
        with self._changed:
            self._todo = deque(
                sorted(self._todo, key=lambda sub_group: sub_group.shard is not shard)
            )

    def wait(self, shard: OptimizerShard | None = None) -> None:
        """Block until `shard` is updated, or everything is; raises the thread's error.

        On an accelerator what the caller gives to its current stream afterwards comes after the
        updates."""

        def is_over() -> bool:
            return self._failure is not None or not (
                self._busy if shard is None else self._left[shard]
            )

        if not is_over():
            if shard is not None:
                self.prefer(shard)
            with self._changed:
                self._changed.wait_for(is_over)
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        # A copy: while one shard is waited for, the thread adds the ends of others.
        for of_shard, end in self._ends.copy().items():
            if shard in (None, of_shard):
                compute_stream(self._device).wait_event(end)

    def is_late(self, shard: OptimizerShard) -> bool:
        """Whether sub-groups of `shard` are still to be updated."""
        return self._left[shard] > 0

    def drop(self) -> None:
        """Skip the remaining updates, and forget a failure: the values are not needed any more."""
        with self._changed:
            self._todo.clear()
            self._changed.wait_for(lambda: not self._busy)
        self._left.clear()
        self._failure = None

    def fail(self, error: BaseException) -> None:
        """Some sub-groups were updated and others not.

        Every `wait` raises `error` until a checkpoint is loaded.
        """
        if not isinstance(error, Exception):
            error = RuntimeError(
                "an optimizer step was interrupted; load a checkpoint before going on"
            )
        self._failure = error
        self._todo.clear()
        self._left.clear()

    def _plan(self, sub_groups: Iterable[SubGroup]) -> None:
        self._todo = deque(sub_groups)
        self._ends.clear()
        self._left = Counter(sub_group.shard for sub_group in self._todo)

    def _work_in_thread(
        self, state: SubGroupState, update: Update, ready: torch.Event | None
    ) -> None:
        try:
            with torch.no_grad(), beside(self._device, ready, self._stream) as self._stream:
                self._work(state, update, self._stream)
        except BaseException as error:
            self.fail(error)
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _work(
        self, state: SubGroupState, update: Update, stream: torch.Stream | None = None
    ) -> None:
        ahead: SubGroupInMemory | None = None
        writing = Pending()
        progress, total = Progress(self._shows, "optimizer"), len(self._todo)
        sub_group, following = self._next()
        while sub_group is not None:
            if ahead is not None and ahead.sub_group is sub_group:
                values, ahead = ahead, None
            else:
                values = self._in_memory(sub_group, state)
            values.wait()
            if self._read_ahead and following is not None and ahead is None:
                ahead = self._in_memory(following, state)
            with label("update"):
                weights = update(values)
                rounded = sub_group.shard.round_into_shard(sub_group.start, weights)
            writing.wait()
            writing = values.write(rounded)
            if values.is_in_files and not self._write_behind:
                writing.wait()
            del values, weights, rounded  # they would keep the buffers from being used again
            self._done(sub_group, stream)
            progress.advance(total)
            sub_group, following = self._next()
        writing.wait()

    def _in_memory(self, sub_group: SubGroup, state: SubGroupState) -> SubGroupInMemory:
        return SubGroupInMemory(sub_group, state, self._buffers, self._for_weights)

    def _next(self) -> tuple[SubGroup | None, SubGroup | None]:
        """The next sub-group and the one that will probably follow."""
        with self._changed:
            sub_group = self._todo.popleft() if self._todo else None
            return sub_group, self._todo[0] if self._todo else None

    def _done(self, sub_group: SubGroup, stream: torch.Stream | None) -> None:
        with self._changed:
            self._left[sub_group.shard] -= 1
            if not self._left[sub_group.shard]:
                if stream is not None:
                    self._ends[sub_group.shard] = stream.record_event()
                del self._left[sub_group.shard]
                self._changed.notify_all()
