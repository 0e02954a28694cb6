"""Lets the ranks of a job exchange small JSON values about a checkpoint, over separate connections.
If one rank fails, all raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero.checkpoint.manifest import DamagedCheckpointError
from zero.comm.communicator import Communicator
from zero.comm.watchdog import LONE, Watchdog, tells_if_alone
from zero.comm.world import default_timeout
from zero.errors import UsageError

T = TypeVar("T")

_connections: WeakKeyDictionary[Communicator, dist.ProcessGroupGloo] = WeakKeyDictionary()
# The kinds of error that every rank raises unchanged. All others become a RuntimeError.
_ERRORS = {
    kind.__name__: kind
    for kind in (DamagedCheckpointError, UsageError, ValueError, OSError, RuntimeError)
}


def connect(comm: Communicator, what: str) -> dist.ProcessGroupGloo:
    """Create gloo connections among all ranks, separate from the ones used for training. All ranks
    must call it together.

    The watchdog covers the wait, because a rank may die before it connects; `what` names the action
    in its message. The connections are not registered with torch.distributed: a script may destroy
    its process groups while a thread uses them."""
    # A clone: rank 0's own store would keep the server alive, and its port in use, after the groups
    # are destroyed.
    server: Any = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"zero/checkpoint/{next(comm.serials)}", server.clone())
    return comm.watchdog.wait(
        lambda: dist.ProcessGroupGloo(store, comm.rank, comm.world_size, default_timeout()),
        f"connecting ({what})",
    )


class Ranks:
    """Collectives of JSON values in host memory; `what` names the action in errors.

    `watchdog` covers the waits. It is None in a thread, because the watchdog only knows the waits
    of the main thread."""

    def __init__(
        self, connection: dist.ProcessGroupGloo, what: str, watchdog: Watchdog | None = None
    ):
        self.rank = connection.rank()
        self.world_size = connection.size()
        self._connection: Any = connection  # torch's stubs lack its collectives
        self._what = what
        self._watchdog = watchdog
        # The least time limit of a wait in seconds, because one rank may be writing a whole model.
        self._patience = 0.8 * default_timeout().total_seconds()

    @classmethod
    def of_job(cls, comm: Communicator, what: str) -> Ranks:
        """For the main thread: wait here for all ranks, because every rank must do `what`.

        A rank that has waited for `LONE` seconds prints a message. The first call connects the
        ranks.
        """
        with tells_if_alone(comm.rank, what, LONE):
            if comm not in _connections:
                _connections[comm] = connect(comm, what)
            ranks = cls(_connections[comm], what, comm.watchdog)
            ranks.any(False)
        return ranks

    def exchange(self, act: Callable[[], object], conclude: Callable[[list[Any]], T]) -> T:
        """Run `act` on every rank, and `conclude` on rank 0 with all results, in rank order. Every
        rank returns what `conclude` returns.

        If either fails on any rank, all ranks raise an error that names the first such rank.
        """
        outcome, failure = self._attempt(act)
        outcomes = self._gather(outcome)
        if self.rank == 0:
            failed = next((each for each in outcomes if "error" in each), None)
            if failed is None:
                values = [each["value"] for each in outcomes]
                outcome, failure = self._attempt(lambda: conclude(values))
            else:
                outcome = failed
        outcome = self._broadcast(outcome)
        if "error" in outcome:
            kind, arguments = outcome["error"]
            # A user's mistake is reported once, a system error with its rank and place.
            raise _ERRORS[kind](*arguments) from (
                None if isinstance(failure, ValueError) else failure
            )
        return outcome["value"]

    def together(self, act: Callable[[], T]) -> T:
        """Run `act` on every rank; each returns its own result, which may be of any type.

        If it fails on one rank, all raise an error that names it.
        """
        results: list[T] = []
        self.exchange(lambda: results.append(act()), lambda _: None)
        return results[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: cheap enough for every step."""
        flags = torch.tensor([int(flag)], device="cpu")
        self._wait(self._connection.allreduce([flags]))
        return bool(flags)

    def _attempt(self, act: Callable[[], object]) -> tuple[dict[str, Any], Exception | None]:
        try:
            return {"value": act()}, None
        except Exception as error:
            return {"error": self._portable(error)}, error

    def _portable(self, error: Exception) -> tuple[str, list]:
        """Return the error as all ranks raise it: its kind and its arguments."""
        where = f"{self._what}: rank {self.rank}" if self.world_size > 1 else self._what
        if isinstance(error, OSError) and error.errno is not None:
            file = f": {error.filename}" if error.filename else ""
            return "OSError", [error.errno, f"{where}: {error.strerror}{file}"]
        for name, kind in _ERRORS.items():
            if isinstance(error, kind) and (kind is not RuntimeError or type(error) is kind):
                return name, [f"{where}: {error}"]
        return "RuntimeError", [f"{where}: {type(error).__name__}: {error}"]

    def _wait(self, work: dist.Work) -> None:
        if self._watchdog is None:
            work.wait()
        else:
            self._watchdog.wait(work.wait, self._what, self._patience)

    def _gather(self, value: object) -> list[Any]:
        """Return every rank's value on rank 0, and nothing on the others."""
        content = _bytes(value)
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device="cpu")
        sizes[self.rank] = content.numel()
        self._wait(self._connection.allreduce([sizes]))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
        padded[: content.numel()] = content
        received = [torch.empty_like(padded) for _ in range(self.world_size * (self.rank == 0))]
        # The shorter form, with tensor and rank, fails with gloo of torch 2.8.
        options = dist.GatherOptions()
        options.rootRank = 0
        outputs = [received] if received else []
        self._wait(self._connection.gather(outputs, [padded], options))
        return [_value(data[:size]) for data, size in zip(received, sizes.tolist(), strict=False)]

    def _broadcast(self, value: object) -> Any:
        """Return rank 0's value on every rank."""
        content = _bytes(value)
        size = torch.tensor([content.numel()], device="cpu")
        self._wait(self._connection.broadcast(size, 0))
        if self.rank > 0:
            content = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._wait(self._connection.broadcast(content, 0))
        return _value(content)


def _bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(content: torch.Tensor) -> Any:
    return json.loads(content.numpy().tobytes())
