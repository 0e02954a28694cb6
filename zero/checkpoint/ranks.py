"""Collectives of small values: every rank gets all results, and if one rank fails, all raise the
same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero.checkpoint.manifest import DamagedCheckpointError
from zero.comm.communicator import Communicator
from zero.comm.watchdog import Watchdog
from zero.comm.world import default_timeout
from zero.errors import UsageError

T = TypeVar("T")

_connections: WeakKeyDictionary[Communicator, dist.ProcessGroupGloo] = WeakKeyDictionary()


def connect(comm: Communicator, what: str) -> dist.ProcessGroupGloo:
    """New gloo connections among all ranks, besides those of training; every rank must call it at
    the same time.

    The watchdog covers the wait, because a rank may die before it connects; `what` names the action
    in its message. The connections are not registered with torch.distributed: a script may destroy
    its process groups while a thread uses them."""
    # A clone: rank 0's own store would keep the server alive, and its port in use, after the groups
    # are destroyed.
    store = dist.distributed_c10d._get_default_store().clone()
    store = dist.PrefixStore(f"zero/checkpoint/{next(comm.serials)}", store)
    return comm.watchdog.wait(
        lambda: dist.ProcessGroupGloo(store, comm.rank, comm.world_size, default_timeout()),
        f"connecting ({what})",
    )


def _patience() -> float:
    """Seconds that a wait may take here at least: one rank may write a whole model while the others
    wait.
    """
    return 0.8 * default_timeout().total_seconds()


class Ranks:
    """Collectives of JSON values in host memory. If one rank fails, all do; `what` names the action
    in errors.

    `watchdog` covers the waits; None in a thread, because the watchdog knows the main thread's
    waits only."""

    def __init__(
        self, connection: dist.ProcessGroupGloo, what: str, watchdog: Watchdog | None = None
    ):
        self.rank = connection.rank()
        self.world_size = connection.size()
        self._connection = connection
        self._what = what
        self._watchdog = watchdog

    @classmethod
    def of(cls, comm: Communicator, what: str) -> Ranks:
        """For the main thread.

        The first call makes connections: every rank must make it at the same time.
        """
        if comm not in _connections:
            _connections[comm] = connect(comm, what)
        return cls(_connections[comm], what, comm.watchdog)

    def _wait(self, work: dist.Work) -> None:
        if self._watchdog is None:
            work.wait()
        else:
            self._watchdog.wait(work.wait, self._what, _patience())

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device="cpu")
        sizes[self.rank] = own.numel()
        self._wait(self._connection.allreduce([sizes]))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
        padded[: own.numel()] = own
        values = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._wait(self._connection.allgather([values], [padded]))
        return [
            json.loads(data[:size].numpy().tobytes())
            for data, size in zip(values, sizes.tolist(), strict=True)
        ]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: cheap enough for every step."""
        flags = torch.tensor([int(flag)], device="cpu")
        self._wait(self._connection.allreduce([flags]))
        return bool(flags)

    def each(self, act: Callable[[], T]) -> list[T]:
        """Run `act` on every rank; return all results.

        If it fails on one, all raise an error that names that rank.
        """
        return self.gather(self.run(act))

    def run(self, act: Callable[[], T]) -> T:
        """As `each`, but return this rank's own result only, which may be of any type."""
        failure, result = None, None
        try:
            result = act()
        except Exception as error:
            failure = error
        for found in self.gather(None if failure is None else self._portable(failure)):
            if found is not None:
                kind, arguments = found
                raise _ERRORS[kind](*arguments) from failure
        return result

    def on_first(self, act: Callable[[], T]) -> T:
        """Run `act` on rank 0; return its result on all ranks."""
        return self.each(lambda: act() if self.rank == 0 else None)[0]

    def _portable(self, error: Exception) -> tuple[str, list]:
        """The error as all ranks raise it: its kind and its arguments."""
        where = f"{self._what}: rank {self.rank}" if self.world_size > 1 else self._what
        if isinstance(error, OSError) and error.errno is not None:
            file = f": {error.filename}" if error.filename else ""
            return "OSError", [error.errno, f"{where}: {error.strerror}{file}"]
        kind = next(
            (name for name, kind in _ERRORS.items() if isinstance(error, kind)), "RuntimeError"
        )
        known = (
            ""
            if type(error).__name__ == kind or kind != "RuntimeError"
            else f"{type(error).__name__}: "
        )
        return kind, [f"{where}: {known}{error}"]


_ERRORS = {
    kind.__name__: kind
    for kind in (DamagedCheckpointError, UsageError, ValueError, OSError, RuntimeError)
}
