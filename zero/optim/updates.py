"""When tiles are updated, and how those in files come to memory for it.

[Note: just-in-time updates]
With the norm and the overflow known, the update of a tile depends on nothing but the tile. So `step` may return at
once: a thread updates tiles in the order in which the next forward needs them, and a gather waits for its own unit
alone, whose tiles then come first. The numbers are those of a step that waits.

[Note: files]
The tensors of a tile that lie in a file are mapped memory for everybody else. For its update they are read into host
buffers, the tensors are pointed there, and afterwards written and pointed back. While one tile is updated the next one
is read (`pipeline_read`) and the last one is written (`pipeline_write`).
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from zero.clock import Progress
from zero.comm import Pending
from zero.offload.memory import HostMemory
from zero.unit import Unit

# Of a tile with its gradient; the result is what of it is still being written.
Update = Callable[["Tile", torch.Tensor], Pending]


@dataclass(frozen=True, eq=False)
class Tile:
    """A piece of one unit's master that belongs to one param group: what the optimizer sees as a parameter."""

    unit: Unit
    group: int
    start: int
    master: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + self.master.numel()


class _Staged:
    """One tile with everything it needs in memory; `grad` is its gradient there."""

    def __init__(self, tile: Tile, state_of: Callable[[Tile], dict], memory: HostMemory):
        self._tile, self._state_of, self._memory = tile, state_of, memory
        self._reads: list[Pending] = []
        self.grad = self._read(tile.unit.grad[tile.start : tile.end])
        # Each tensor that lies in a file, its memory there, and the buffer in place of that.
        self._moved = [
            (tensor, tensor.data, self._read(tensor))
            for tensor in (tile.master, *self._state_tensors())
            if tile.unit.optimizer_tier.holds_in_file(tensor)
        ]

    def _state_tensors(self) -> list[torch.Tensor]:
        values = self._state_of(self._tile).values()
        return [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a buffer to which it is being read."""
        tier = self._tile.unit.optimizer_tier
        if not tier.holds_in_file(tensor):
            return tensor
        buffer = self._memory.like(tensor)
        self._reads.append(tier.load(buffer, tensor))
        return buffer

    def enter(self) -> None:
        """Wait for the reads and point the tensors to the buffers."""
        for read in self._reads:
            read.wait()
        for tensor, _, buffer in self._moved:
            tensor.data = buffer

    def point_back(self) -> None:
        """The tensors are those in the file again."""
        for tensor, home, _ in self._moved:
            tensor.data = home

    def leave(self, written: Pending) -> Pending:
        """Point the tensors back and start to write them; state that is new gets its place in the file."""
        self.point_back()
        unit, tier = self._tile.unit, self._tile.unit.optimizer_tier
        writes = [written, *(tier.store(home, buffer) for _, home, buffer in self._moved)]
        goes = tier.puts_in_file(unit.master.nbytes)  # tiles may be small: they are many
        for value in self._state_tensors() if goes else ():
            if not tier.holds_in_file(value):
                home = tier.file.empty(value.numel(), value.dtype)
                writes.append(tier.store(home, value.data))
                value.data = home
        stored = Pending(writes)
        unit.is_stored_by(stored)
        return stored


_all: weakref.WeakSet[Updates] = weakref.WeakSet()


@atexit.register
def _drop_all() -> None:
    """At exit nobody wants the rest of the updates, and a thread must not be at work when the interpreter goes."""
    for updates in list(_all):
        updates.drop()


class Updates:
    """Updates tiles by a function of (tile, gradient), now or in a thread.

    Args: state_of: gives a tile's optimizer state, which may be empty; read_ahead, write_behind: see the note on files;
    shows: a slow run tells its progress.
    """

    def __init__(self, state_of: Callable[[Tile], dict], read_ahead: bool, write_behind: bool, shows: bool):
        self._state_of, self._shows, self._memory = state_of, shows, HostMemory()
        self._read_ahead, self._write_behind = read_ahead, write_behind
        self._todo: deque[Tile] = deque()
        self._open: Counter[Unit] = Counter()
        self._busy = False
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        _all.add(self)

    def run(self, tiles: Iterable[Tile], update: Update) -> None:
        """Update `tiles` before returning."""
        self._plan(tiles)
        try:
            self._work(update)
        except BaseException as error:
            self.fail(error)
            raise

    def start(self, tiles: Iterable[Tile], update: Update) -> None:
        """Update `tiles` in a thread. The earlier ones must have been waited for."""
        self._plan(tiles)
        if self._open:
            self._busy = True
            threading.Thread(target=self._work_in_thread, args=(update,), name="zero optimizer", daemon=True).start()

    def wait(self, unit: Unit | None = None) -> None:
        """Until `unit` is updated, or everything is, and written; raises what went wrong in the thread."""

        def is_over() -> bool:
            return self._failure is not None or not (self._busy if unit is None else self._open[unit])

        if not is_over():
            with self._changed:
                if unit is not None:
                    self._todo = deque(sorted(self._todo, key=lambda tile: tile.unit is not unit))
                self._changed.wait_for(is_over)
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def is_late(self, unit: Unit) -> bool:
        """Whether tiles of `unit` are still to be updated."""
        return self._open[unit] > 0

    def drop(self) -> None:
        """Leave out what is not updated yet, and forget a failure: the values are not wanted any more."""
        with self._changed:
            self._todo.clear()
            self._changed.wait_for(lambda: not self._busy)
        self._open.clear()
        self._failure = None

    def fail(self, error: BaseException) -> None:
        """Some tiles were updated and others not: all that follows is wrong until a checkpoint is loaded."""
        if not isinstance(error, Exception):
            error = RuntimeError("an optimizer step was interrupted; load a checkpoint before going on")
        self._failure = error
        self._todo.clear()
        self._open.clear()

    def _plan(self, tiles: Iterable[Tile]) -> None:
        self._todo = deque(tiles)
        self._open = Counter(tile.unit for tile in self._todo)

    def _work_in_thread(self, update: Update) -> None:
        try:
            with torch.no_grad():
                self._work(update)
        except BaseException as error:
            self.fail(error)
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _work(self, update: Update) -> None:
        ahead: dict[Tile, _Staged] = {}
        behind = Pending()
        progress, total = Progress(self._shows, "optimizer"), len(self._todo)
        tile, following = self._next()
        while tile is not None:
            staged = ahead.pop(tile, None) or self._stage(tile)
            staged.enter()
            if self._read_ahead and following is not None and not ahead:
                ahead[following] = self._stage(following)
            try:
                written = update(tile, staged.grad)
            except BaseException:
                staged.point_back()
                raise
            behind.wait()
            behind = staged.leave(written)
            del staged, written  # and with them what keeps the buffers from being used again
            if not self._write_behind:
                behind.wait()
            self._done(tile)
            progress.advance(total)
            tile, following = self._next()
        behind.wait()

    def _stage(self, tile: Tile) -> _Staged:
        return _Staged(tile, self._state_of, self._memory)

    def _next(self) -> tuple[Tile | None, Tile | None]:
        """The next tile and the one that will probably follow."""
        with self._changed:
            tile = self._todo.popleft() if self._todo else None
            return tile, self._todo[0] if self._todo else None

    def _done(self, tile: Tile) -> None:
        with self._changed:
            self._open[tile.unit] -= 1
            if not self._open[tile.unit]:
                del self._open[tile.unit]
                self._changed.notify_all()
