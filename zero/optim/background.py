"""Decides when sub-groups are updated, and reads and writes those in files.

[Note: late updates] Once norm and overflow are known, the update of a sub-group depends on nothing
but the sub-group. So `step` may return at once. A thread then updates the sub-groups, in the order
in which the next forward needs them. An all-gather waits for its own group only, whose sub-groups
are then updated first. Results equal those of a synchronous step. On an accelerator the thread has
a stream of its own: on the default one its copies would delay the forward's kernels.

[Note: files] Tensors of a sub-group that are in a file are read into host buffers, updated there,
and written back. While one sub-group is updated the next ones are read (`pipeline_read`) and the
last ones are written (`pipeline_write`). After the last update the first ones are read for the
next step, all but their gradients, so that the disk is busy during backward, too. Updated weights
stay in host memory until the next all-gather has taken them. All this is limited by the bytes of
the buffers. Weights that go from host memory to an accelerator are always copied while the next
sub-group is updated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from zero.comm.clock import Progress, label
from zero.comm.work import Pending
from zero.core.optimizer_shard import OptimizerShard
from zero.device import beside, compute_stream, is_accelerator, ready_for_thread
from zero.offload.pinned import HostMemory
from zero.optim.subgroups import SubGroup, SubGroupInMemory
from zero.threads import EngineThread

# Makes the update in memory; the result has the values for the group's weights.
Update = Callable[[SubGroupInMemory], torch.Tensor]


class Updates:
    """Updates sub-groups by a function, now or in a thread.

    Args:
        device: that computes.
        most: bytes of host memory for reads ahead, writes, and weights that are not gathered yet;
            each may exceed it by a sub-group. 0: nothing is read ahead.
        write_behind: see the note on files.
        shows: print the progress of slow updates.

    Attributes:
        number: of the present updates; grows with each `run`, each `start` and each failure.
    """

    def __init__(self, device: torch.device, most: int, write_behind: bool, shows: bool):
        self._device = device
        self._shows = shows
        self._buffers = HostMemory()
        self._for_weights = HostMemory(pin=is_accelerator(device))
        # Of late updates: always the same one, so that memory which one step frees is used again
        # after it.
        self._stream: torch.Stream | None = None
        # The shards of the last `run` or `start`.
        self._shards: set[OptimizerShard] = set()
        self._most = most
        self._ahead: dict[SubGroup, SubGroupInMemory] = {}
        self._writes: deque[tuple[Pending, int]] = deque()
        self._write_behind = write_behind
        self._todo: deque[SubGroup] = deque()
        self._thread: EngineThread | None = None
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self.number = 1

    def run(self, sub_groups: Iterable[SubGroup], update: Update) -> None:
        """Update `sub_groups` before returning."""
        self._plan(sub_groups)
        try:
            self._work(update)
        except BaseException as error:
            self.fail(error)
            raise

    def start(self, sub_groups: Iterable[SubGroup], update: Update) -> None:
        """Update `sub_groups` in a thread. The caller has waited for the earlier ones."""
        self._plan(sub_groups)
        if self._todo:
            # At exit the remaining updates are not needed.
            act, end = self._work_in_thread, self._skip_rest
            ready = ready_for_thread(self._device)
            self._thread = EngineThread(act, update, ready, name="zero optimizer", end=end)
            self._thread.start()

    def prefer(self, shard: OptimizerShard) -> None:
        """Update the sub-groups of `shard` next: somebody needs them."""
        with self._changed:
            self._todo = deque(sorted(self._todo, key=lambda each: each.shard is not shard))

    def wait(self, shard: OptimizerShard | None = None) -> None:
        """Block until `shard` is updated, or everything is; raises the thread's error.

        On an accelerator what the caller gives to its current stream afterwards comes after the
        updates."""

        if shard is None:
            self._join()
        elif shard.sub_groups_left:
            self.prefer(shard)
            with self._changed:
                self._changed.wait_for(lambda: not shard.sub_groups_left)
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        for waited in self._shards if shard is None else (shard,):
            if waited.update_end is not None:
                compute_stream(self._device).wait_event(waited.update_end)

    def drop(self) -> None:
        """Skip the remaining updates, and forget a failure: the values are not needed any more."""
        self._skip_rest()
        self._join()
        self.forget_ahead()
        self._failure = None

    def forget_ahead(self) -> None:
        """Forget what was read for the next step, because the state may change. The caller has
        waited for the updates.
        """
        for values in self._ahead.values():
            with suppress(OSError):  # nobody needs them
                values.wait()
        self._ahead.clear()

    def _join(self) -> None:
        """Wait for the thread, which after its last update lets go of events and of memory."""
        if self._thread is not None:
            self._thread.join()

    def fail(self, error: BaseException) -> None:
        """Some sub-groups were updated and others not.

        Every `wait` raises `error` until a checkpoint is loaded.
        """
        if not isinstance(error, Exception):
            text = "an optimizer step was interrupted; load a checkpoint before going on"
            error = RuntimeError(text)
        self._failure = error
        self.number += 1
        self._skip_rest()

    def _skip_rest(self) -> None:
        with self._changed:  # `prefer` may be sorting them
            self._todo.clear()
            for shard in self._shards:
                shard.sub_groups_left = 0
            self._changed.notify_all()

    def _plan(self, sub_groups: Iterable[SubGroup]) -> None:
        self._skip_rest()
        self.number += 1
        for shard in self._shards:
            shard.update_end = None
        self._todo = deque(sub_groups)
        self._shards = {sub_group.shard for sub_group in self._todo}
        for shard in self._shards:
            shard.new_weights = {}
        for sub_group in self._todo:
            sub_group.shard.sub_groups_left += 1

    def _work_in_thread(self, update: Update, ready: torch.Event | None) -> None:
        try:
            with torch.no_grad(), beside(self._device, ready, self._stream) as self._stream:
                self._work(update, self._stream)
        except BaseException as error:
            self.fail(error)

    def _work(self, update: Update, stream: torch.Stream | None = None) -> None:
        progress, order = Progress(self._shows, "optimizer"), list(self._todo)
        self._writes.clear()  # of a step that failed
        most = self._most if any(each.is_in_files for each in order) else 0
        while (sub_group := self._next()) is not None:
            values = self._ahead.pop(sub_group, None)
            if values is None or not values.is_current:
                values = self._read(sub_group)
            values.read_gradient()
            values.wait()
            if most:
                self._read_ahead()
            shard = sub_group.shard
            with label(f"update of {sub_group.group.name}"):
                weights = update(values)
                rounded = shard.round_into_shard(sub_group.start, weights)
            if most and self._in_buffers() < most:
                shard.keep_new_weights(sub_group.start, weights)
            self._write(values, rounded)
            del values, weights, rounded  # they would keep the buffers from being used again
            self._done(sub_group, stream)
            progress.advance(len(order))
        for written, _ in self._writes:
            written.wait()
        self._writes.clear()
        for sub_group in order:
            if most and self._in_buffers() < most:
                self._ahead[sub_group] = self._read(sub_group)

    def _read(self, sub_group: SubGroup) -> SubGroupInMemory:
        return SubGroupInMemory(sub_group, self._buffers, self._for_weights)

    def _read_ahead(self) -> None:
        with self._changed:
            upcoming = list(self._todo)
        for sub_group in upcoming:
            if sub_group not in self._ahead:
                if self._in_buffers() >= self._most // 2:  # the rest is for writes and new weights
                    return
                self._ahead[sub_group] = self._read(sub_group)
            self._ahead[sub_group].read_gradient()

    def _in_buffers(self) -> int:
        """Bytes of what is read ahead, is being written, or waits for an all-gather."""
        weights = (each for shard in self._shards for each in shard.new_weights.values())
        return (
            sum(values.nbytes for values in self._ahead.values())
            + sum(nbytes for _, nbytes in self._writes)
            + sum(each.nbytes for each in weights)
        )

    def _write(self, values: SubGroupInMemory, rounded: Pending) -> None:
        """Start to store updated values; wait for earlier ones that have no room beside them."""
        self._writes.append((values.write(rounded), values.nbytes))
        in_files = values.sub_group.is_in_files
        while len(self._writes) > (not in_files or self._write_behind):
            if in_files and self._write_behind and self._in_buffers() < self._most:
                return
            self._writes.popleft()[0].wait()

    def _next(self) -> SubGroup | None:
        with self._changed:
            return self._todo.popleft() if self._todo else None

    def _done(self, sub_group: SubGroup, stream: torch.Stream | None) -> None:
        with self._changed:
            shard = sub_group.shard
            if shard.sub_groups_left == 1 and stream is not None:
                # Before the count: whoever sees that nothing is left waits for the event.
                shard.update_end = stream.record_event()
            if shard.sub_groups_left:  # else the rest was skipped
                shard.sub_groups_left -= 1
            if not shard.sub_groups_left:
                self._changed.notify_all()
