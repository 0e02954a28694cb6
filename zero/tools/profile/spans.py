"""What runs beside the main thread: collectives in flight, copies, file transfers and late updates,
with their times.

torch's profiler sees the main thread and the device. The rest is recorded here. The methods that
start such work are wrapped in the traced process alone, so an ordinary run pays nothing."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from zero.comm.communicator import Communicator
from zero.comm.work import Pending
from zero.offload.nvme import ScratchFile
from zero.offload.tiers import Tier
from zero.optim.subgroups import SubGroupInMemory
from zero.optim.update import SubGroupUpdate
from zero.optim.whole_tensor import WholeTensorState

GATHERS, REDUCTIONS, OTHERS = "all-gathers in flight", "reductions in flight", "other collectives"
COPIES, READS, WRITES = "copies", "file reads", "file writes"
UPDATES, LATE = "updates in the step", "late updates"
# From the top of the picture to the bottom.
TRACKS = (GATHERS, REDUCTIONS, OTHERS, COPIES, READS, WRITES, UPDATES, LATE)


class Span(NamedTuple):
    """`start` and `end` are nanoseconds since the epoch."""

    track: str
    name: str
    start: int
    end: int
    facts: dict[str, Any]


class Spans:
    """Records while `is_on`. What is in flight at `stop` ends there."""

    def __init__(self) -> None:
        self.is_on = False
        self.done: list[Span] = []
        self._open: dict[int, tuple[str, str, int, dict[str, Any]]] = {}
        self._wrap_all()

    def stop(self) -> list[Span]:
        self.is_on = False
        now = time.time_ns()
        cut = [
            Span(track, name, start, now, facts)
            for track, name, start, facts in list(self._open.values())
        ]
        return self.done + cut

    def _wrap_all(self) -> None:
        self._in_flight(
            Communicator,
            "all_gather",
            GATHERS,
            lambda comm, full, shard, param_group=None: _about(param_group, full),
        )
        self._in_flight(
            Communicator,
            "reduce_scatter",
            REDUCTIONS,
            lambda comm, out, full, accumulate, max_numel, param_group=None: _about(
                param_group, full
            ),
        )
        self._in_flight(
            Communicator,
            "start_all_to_all",
            REDUCTIONS,
            lambda comm, received, sent, param_group=None, across=False: _about(
                param_group, received
            ),
        )
        self._while_called(
            Communicator, "all_reduce", OTHERS, lambda comm, tensor, *_, **__: _about("sum", tensor)
        )
        self._while_called(
            Communicator,
            "broadcast",
            OTHERS,
            lambda comm, tensor, *_, **__: _about("broadcast", tensor),
        )
        self._in_flight(
            Communicator,
            "start_all_to_all_of_parts",
            OTHERS,
            lambda comm, received, *_: _about("all-to-all", received),
        )
        self._in_flight(Tier, "load", COPIES, _load)
        self._in_flight(Tier, "store", COPIES, _store)
        self._while_called(ScratchFile, "_carry_out", _direction, _request)
        self._while_called(
            SubGroupUpdate,
            "__call__",
            _updater,
            lambda update, values: _about(values.sub_group.group, values.master),
        )
        self._while_called(
            SubGroupInMemory, "wait", _updater, lambda sub_group: _about("wait for files", None)
        )
        self._while_called(
            WholeTensorState, "update", UPDATES, lambda *_: _about("whole tensors", None)
        )

    def _in_flight(self, cls: type, method: str, track: str, describe: Callable) -> None:
        """Record each call from its start to the first return of its result's `wait`."""
        original = getattr(cls, method)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Pending:
            found = describe(*args, **kwargs) if self.is_on else None
            if found is None:
                return original(*args, **kwargs)
            key, start = object(), time.time_ns()
            self._open[id(key)] = (track, found[0], start, found[1])
            pending = original(*args, **kwargs)
            wait = pending.wait

            def finish() -> None:
                wait()
                if self._open.pop(id(key), None) is not None and self.is_on:
                    self.done.append(Span(track, found[0], start, time.time_ns(), found[1]))

            pending.wait = finish
            return pending

        setattr(cls, method, wrapped)

    def _while_called(
        self, cls: type, method: str, track: str | Callable[..., str], describe: Callable
    ) -> None:
        """Record each call from its start to its return."""
        original = getattr(cls, method)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return original(*args, **kwargs)
            name, facts = describe(*args, **kwargs)
            start = time.time_ns()
            try:
                return original(*args, **kwargs)
            finally:
                where = track if isinstance(track, str) else track(*args)
                self.done.append(Span(where, name, start, time.time_ns(), facts))

        setattr(cls, method, wrapped)


def _about(what: Any, tensor: Any) -> tuple[str, dict[str, Any]]:
    """The name of a span and its facts. `what`: a group, or a text."""
    name = what if isinstance(what, str) else getattr(what, "name", None) or "values"
    return name, {} if tensor is None else {"elements": tensor.numel(), "bytes": tensor.nbytes}


def _load(tier: Tier, target: Any, source: Any) -> tuple[str, dict[str, Any]] | None:
    """Reads from files have a track of their own."""
    return None if tier.holds_in_file(source) else _about("load", source)


def _store(tier: Tier, target: Any, values: Any) -> tuple[str, dict[str, Any]] | None:
    return None if tier.holds_in_file(target) else _about("store", values)


def _direction(file: ScratchFile, *request: Any) -> str:
    return READS if request[4] else WRITES


def _request(
    file: ScratchFile, position: int, address: int, nbytes: int, *_: Any
) -> tuple[str, dict[str, Any]]:
    return f"{nbytes / 2**20:.1f} MiB", {"bytes": nbytes, "position": position}


def _updater(*_: Any) -> str:
    return LATE if threading.current_thread().name == "zero optimizer" else UPDATES
