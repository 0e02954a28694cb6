"""All ranks act together: what one rank finds out all know, and where one fails, all raise the same error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero.checkpoint import folder as folders
from zero.comm import Communicator, default_timeout

T = TypeVar("T")


class Ranks:
    """Object collectives among all ranks in host memory, in which no rank fails alone."""

    _of: WeakKeyDictionary[Communicator, Ranks] = WeakKeyDictionary()

    def __init__(self, comm: Communicator):
        self.rank, self.world_size = comm.rank, comm.world_size
        self.in_background = 0  # how many `StoreRanks` were made of these
        # A group of its own: on the host whatever the device is, and apart from the messages of training.
        self._group = dist.new_group(backend="gloo", timeout=default_timeout())

    @classmethod
    def of(cls, comm: Communicator) -> Ranks:
        """Those of a communicator; every rank must ask at the same time, the first time."""
        if comm not in cls._of:
            cls._of[comm] = cls(comm)
        return cls._of[comm]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: cheap enough for every step."""
        flags = torch.tensor([flag], dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return bool(flags)

    def together(self, what: str, act: Callable[[], T]) -> T:
        """`act()` on every rank; if it fails on any rank, an error naming `what` and that rank on all of them."""
        failure, result = None, None
        try:
            result = act()
        except Exception as error:
            failure = error
        for rank, report in enumerate(self.gather(None if failure is None else _portable(failure))):
            if report is not None:
                where = f"{what}: rank {rank}" if self.world_size > 1 else what
                raise _rebuild(*report, where) from failure
        return result

    def each(self, what: str, act: Callable[[], T]) -> list[T]:
        """As `together`, but every rank's result for all ranks."""
        return self.gather(self.together(what, act))

    def on_first(self, what: str, act: Callable[[], T]) -> T:
        """Rank 0's `act()`, for all ranks."""
        return self.each(what, lambda: act() if self.rank == 0 else None)[0]


class StoreRanks(Ranks):
    """The same among threads in the background, while the main threads use any process group or destroy it.

    Values go through the store by which the ranks found each other. `close` after the last use.
    """

    def __init__(self, ranks: Ranks):
        self.rank, self.world_size, self._rounds = ranks.rank, ranks.world_size, 0
        if self.world_size > 1:
            ranks.in_background += 1  # at the same time on all ranks
            # A connection of its own: one that waits blocks everybody else who uses it.
            store = dist.distributed_c10d._get_default_store().clone()
            self._store = dist.PrefixStore(f"zero/checkpoint/{ranks.in_background}", store)
            self._store.set_timeout(default_timeout())

    def gather(self, value: T) -> list[T]:
        if self.world_size == 1:
            return [value]
        self._rounds += 1
        self._store.set(f"{self._rounds}/{self.rank}", pickle.dumps(value))
        values = [pickle.loads(self._store.get(f"{self._rounds}/{rank}")) for rank in range(self.world_size)]
        # Everyone has come to this round, so nobody reads the one before any more.
        self._store.delete_key(f"{self._rounds - 1}/{self.rank}")
        return values

    def close(self) -> None:
        """Rank 0, in whose process the store may be, leaves last."""
        if self.world_size == 1:
            return
        self._store.set(f"bye/{self.rank}", b"")
        if self.rank == 0:
            for rank in range(self.world_size):
                self._store.get(f"bye/{rank}")


def _portable(error: BaseException) -> tuple[str, int | None, str]:
    """What to tell other ranks of an error: kind, number, message."""
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        return "OSError", error.errno, text + (f": {error.filename}" if error.filename else "")
    for kind in (folders.DamagedCheckpointError, ValueError):
        if isinstance(error, kind):
            return kind.__name__, None, str(error)
    return "RuntimeError", None, f"{type(error).__name__}: {error}"


def _rebuild(kind: str, number: int | None, message: str, where: str) -> Exception:
    if kind == "OSError":
        return OSError(f"{where}: {message}") if number is None else OSError(number, f"{where}: {message}")
    kinds = {"DamagedCheckpointError": folders.DamagedCheckpointError, "ValueError": ValueError}
    return kinds.get(kind, RuntimeError)(f"{where}: {message}")
