"""When tiles are updated, and how tiles in files are read and written for it.

This file does not know what an update computes.

[Note: late updates] Once norm and overflow are known, the update of a tile depends on nothing but
the tile. So `step` may return at once. A thread then updates the tiles, in the order in which the
next forward needs them. An all-gather waits for its own group only, whose tiles are then updated
first. Results equal those of a synchronous step. On an accelerator the thread has a stream of its
own: on the default one its copies would delay the forward's kernels.

[Note: files] Tensors of a tile that are in a file are read into host buffers, updated there, and
written back. While one tile is updated the next one is read (`pipeline_read`) and the last one is
written (`pipeline_write`). Weights that go from host memory to an accelerator are always copied
while the next tile is updated."""

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
from zero.device import beside, compute_stream, ready_for_thread
from zero.offload.pinned import HostMemory
from zero.optim.subgroups import Tile, TiledState, is_state_tensor


class TileInMemory:
    """One tile with everything that its update needs in memory.

    An update reads `grad` and changes `master` and `state` (values by the optimizer's names).
    `write` stores them. `is_in_files`: some of it may be in a file."""

    def __init__(self, tile: Tile, state: TiledState, memory: HostMemory):
        self.tile = tile
        self._state = state
        self._memory = memory
        self._tier = tile.shard.tier
        self.is_in_files = self._tier.file is not None or tile.group.tier.file is not None
        self._reads: list[Pending] = []
        self._stored = state.of(tile)
        self.grad = self._read(tile.shard.grad[tile.start : tile.end])
        self.master = self._read(tile.master)
        self.state = {
            key: self._read(each) if is_state_tensor(each) else each
            for key, each in self._stored.items()
        }

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a buffer to which it is being read."""
        if not self._tier.holds_in_file(tensor):
            return tensor
        buffer = self._memory.like(tensor)
        self._reads.append(self._tier.load(buffer, tensor))
        return buffer

    def wait(self) -> None:
        """Block until everything is in memory."""
        for read in self._reads:
            read.wait()

    def put_state(self, state: dict) -> None:
        """Replace the state by the updated one."""
        self.state = state

    def write(self, rounded: Pending) -> Pending:
        """Start to store what the update has changed; `rounded` is the write to the weights.

        If tiles are in a file, new state gets a place in it.
        """
        shard, tier, writes, stored = self.tile.shard, self._tier, [rounded], {}
        if self.master is not self.tile.master:
            writes.append(tier.store(self.tile.master, self.master))
        in_file = tier.puts_in_file(shard.master.nbytes)  # of all tiles: each one may be small
        for key, value in self.state.items():
            place = self._stored.get(key)
            if not is_state_tensor(value):
                stored[key] = value
                continue
            if not (
                is_state_tensor(place) and tier.holds_in_file(place) and place.dtype == value.dtype
            ):
                place = tier.file.empty(value.numel(), value.dtype) if in_file else value
            if place is not value:
                writes.append(tier.store(place, value))
            stored[key] = place
        self._state.put(self.tile, stored)
        result = Pending(writes)
        shard.add_write(result)
        return result


# Makes the update in memory; the result is the write to the group's weights.
Update = Callable[[TileInMemory], Pending]


_all: weakref.WeakSet[Updates] = weakref.WeakSet()


@atexit.register
def _drop_all() -> None:
    """At exit the remaining updates are not needed, and no thread may still run when the
    interpreter ends.
    """
    for updates in list(_all):
        updates.drop()


class Updates:
    """Updates tiles by a function, now or in a thread.

    Args: device: that computes; read_ahead, write_behind: see the note on files; shows: print the
    progress of slow updates."""

    def __init__(self, device: torch.device, read_ahead: bool, write_behind: bool, shows: bool):
        self._device = device
        self._shows = shows
        self._memory = HostMemory()
        # Of late updates: always the same one, so that memory which one step frees is used again
        # after it.
        self._stream: torch.Stream | None = None
        # The end of late updates on this stream.
        self._ends: dict[OptimizerShard, torch.Event] = {}
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._todo: deque[Tile] = deque()
        self._left: Counter[OptimizerShard] = Counter()
        self._busy = False
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        _all.add(self)

    def run(self, tiles: Iterable[Tile], state: TiledState, update: Update) -> None:
        """Update `tiles` before returning."""
        self._plan(tiles)
        try:
            self._work(state, update)
        except BaseException as error:
            self.fail(error)
            raise

    def start(self, tiles: Iterable[Tile], state: TiledState, update: Update) -> None:
        """Update `tiles` in a thread. The caller has waited for the earlier ones."""
        self._plan(tiles)
        if self._left:
            self._busy = True
            args = state, update, ready_for_thread(self._device)
            threading.Thread(
                target=self._work_in_thread, args=args, name="zero optimizer", daemon=True
            ).start()

    def prefer(self, shard: OptimizerShard) -> None:
        """Update the tiles of `shard` next: somebody needs them."""
        with self._changed:
            self._todo = deque(sorted(self._todo, key=lambda tile: tile.shard is not shard))

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
        ends = (
            list(self._ends.values())
            if shard is None
            else [self._ends[shard]]
            if shard in self._ends
            else []
        )
        for end in ends:
            compute_stream(self._device).wait_event(end)

    def is_late(self, shard: OptimizerShard) -> bool:
        """Whether tiles of `shard` are still to be updated."""
        return self._left[shard] > 0

    def drop(self) -> None:
        """Skip the remaining updates, and forget a failure: the values are not needed any more."""
        with self._changed:
            self._todo.clear()
            self._changed.wait_for(lambda: not self._busy)
        self._left.clear()
        self._failure = None

    def fail(self, error: BaseException) -> None:
        """Some tiles were updated and others not.

        Every `wait` raises `error` until a checkpoint is loaded.
        """
        if not isinstance(error, Exception):
            error = RuntimeError(
                "an optimizer step was interrupted; load a checkpoint before going on"
            )
        self._failure = error
        self._todo.clear()
        self._left.clear()

    def _plan(self, tiles: Iterable[Tile]) -> None:
        self._todo = deque(tiles)
        self._ends.clear()
        self._left = Counter(tile.shard for tile in self._todo)

    def _work_in_thread(self, state: TiledState, update: Update, ready: torch.Event | None) -> None:
        try:
            with torch.no_grad(), beside(self._device, ready, self._stream) as self._stream:
                self._work(state, update, self._stream)
        except BaseException as error:
            self.fail(error)
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _work(self, state: TiledState, update: Update, stream: torch.Stream | None = None) -> None:
        ahead: dict[Tile, TileInMemory] = {}
        writing = Pending()
        progress, total = Progress(self._shows, "optimizer"), len(self._todo)
        tile, following = self._next()
        while tile is not None:
            values = ahead.pop(tile, None) or TileInMemory(tile, state, self._memory)
            values.wait()
            if self._read_ahead and following is not None and not ahead:
                ahead[following] = TileInMemory(following, state, self._memory)
            with label("update"):
                rounded = update(values)
            writing.wait()
            writing = values.write(rounded)
            if values.is_in_files and not self._write_behind:
                writing.wait()
            del values, rounded  # they would keep the buffers from being used again
            self._done(tile, stream)
            progress.advance(total)
            tile, following = self._next()
        writing.wait()

    def _next(self) -> tuple[Tile | None, Tile | None]:
        """The next tile and the one that will probably follow."""
        with self._changed:
            tile = self._todo.popleft() if self._todo else None
            return tile, self._todo[0] if self._todo else None

    def _done(self, tile: Tile, stream: torch.Stream | None) -> None:
        with self._changed:
            self._left[tile.shard] -= 1
            if not self._left[tile.shard]:
                if stream is not None:
                    self._ends[tile.shard] = stream.record_event()
                del self._left[tile.shard]
                self._changed.notify_all()
