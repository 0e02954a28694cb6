"""Times the engine's collectives for the section `comms_logger`, and prints them as a table.

The time runs from the start of a collective until its result is used: what is computed meanwhile is
in it. Nothing is waited for earlier than without the log, because ranks may start collectives in
different orders. On an accelerator the host waits for the computing stream at both ends. The
methods are wrapped while a log runs, so other runs pay nothing."""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from zero.comm.communicator import Communicator
from zero.comm.work import Pending
from zero.config.monitor import CommsLoggerConfig
from zero.device import compute_stream, is_accelerator
from zero.errors import UsageError

# By method: the collective's name, and which argument is the full buffer.
_METHODS = {
    "all_gather": ("all_gather", 0), "reduce_scatter": ("reduce_scatter", 1),
    "start_all_to_all": ("all_to_all", 0),
    "start_all_to_all_of_parts": ("all_to_all", 1), "all_reduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
}  # fmt: skip
# The bus bandwidth by the algorithm's, times (n - 1) / n for n ranks:
# https://github.com/NVIDIA/nccl-tests.
_BUS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
_COLUMNS = (
    "Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)",
    "busbw_avg (Gbps)"
)  # fmt: skip


class Kind(NamedTuple):
    """Collectives that are added up: their name, bytes of the full buffer, and number of ranks."""

    name: str
    nbytes: int
    ranks: int

    def rates(self, seconds: float) -> tuple[float, float]:
        """Bandwidth of the algorithm and of the bus, in 1e9 bits a second, if one takes so long."""
        rate = 8e-9 * self.nbytes / max(seconds, 1e-12)
        times = _BUS.get(self.name.partition(" ")[0])
        return rate, rate if times is None else rate * times * (self.ranks - 1) / self.ranks


class CollectiveLog:
    """Follows all communicators of this process, as long as an engine uses it: see `follow`."""

    def __init__(self, section: CommsLoggerConfig, job: Communicator):
        self._section = section
        self.job = job
        self.users = 0
        # By kind: the number of calls and their seconds.
        self.found: defaultdict[Kind, list[float]] = defaultdict(lambda: [0, 0.0])
        self._is_printed = True
        self._originals = {method: getattr(Communicator, method) for method in _METHODS}
        for method, original in self._originals.items():
            setattr(Communicator, method, self._timed(original, *_METHODS[method]))

    def _wanted(self, name: str) -> bool:
        # DeepSpeed's names go on: `all_gather_into_tensor`.
        return self._section.prof_all or any(
            given.startswith(name) for given in self._section.prof_ops
        )

    def _add(self, kind: Kind, group: object, seconds: float) -> None:
        if self._section.debug and group is not None:
            kind = kind._replace(name=f"{kind.name} | {getattr(group, 'name', group)}")
        entry = self.found[kind]
        entry[0], entry[1], self._is_printed = entry[0] + 1, entry[1] + seconds, False
        if self._section.verbose and self.job.rank == 0:
            rate, bus = kind.rates(seconds)
            print(
                f"comm op: {kind.name} | time (ms): {1000 * seconds:.2f} | msg size: "
                f"{_size(kind.nbytes)} | "
                f"algbw (Gbps): {rate:.2f} | busbw (Gbps): {bus:.2f}",
                file=sys.stderr,
            )

    def lines(self, least: dict[Kind, float] | None = None) -> Iterator[str]:
        """The table. `least`: for one more column, the seconds of the rank that took least."""
        columns = [*_COLUMNS, *(["Straggler(ms)"] if least is not None else [])]
        yield "".join(f"{column:<20}" for column in columns).rstrip()
        for name in sorted({kind.name for kind in self.found}):
            yield name
            for kind, (count, seconds) in sorted(
                item for item in self.found.items() if item[0].name == name
            ):
                numbers = [1000 * seconds, 1000 * seconds / count, *kind.rates(seconds / count)]
                if least is not None:
                    numbers.append(1000 * (seconds - least.get(kind, seconds)))
                cells = [
                    "",
                    _size(kind.nbytes),
                    str(int(count)),
                    *(f"{number:.2f}" for number in numbers),
                ]
                yield "".join(f"{cell:<20}" for cell in cells).rstrip()

    def show(self, with_stragglers: bool = False) -> None:
        """Print the table on rank 0. `with_stragglers`: all ranks must call."""
        least = None
        if with_stragglers:
            tables = self.job.exchange({kind: seconds for kind, (_, seconds) in self.found.items()})
            least = {
                kind: min(table.get(kind, seconds) for table in tables)
                for kind, seconds in tables[0].items()
            }
        self._is_printed = True
        if self.job.rank == 0:
            print("\n".join(self.lines(least)), file=sys.stderr, flush=True)

    def leave(self) -> None:
        """One engine less uses it. After the last one, what was not printed yet is printed."""
        global _log
        self.users -= 1
        if self.users:
            return
        _log = None
        for method, original in self._originals.items():
            setattr(Communicator, method, original)
        if not self._is_printed:
            self.show()

    def _timed(self, original: Callable, name: str, place: int) -> Callable:
        @functools.wraps(original)
        def timed(comm: Communicator, *args: Any, **kwargs: Any) -> Any:
            of_replicas, of_world = kwargs.get("across", False), name in ("all_reduce", "broadcast")
            ranks = (
                comm.world_size
                if of_world
                else (comm.replicate_group if of_replicas else comm.shard_group).size
            )
            if ranks == 1 or not self._wanted(name):
                return original(comm, *args, **kwargs)
            group = kwargs.get(
                "param_group", next((each for each in args if hasattr(each, "serial")), None)
            )
            kind, start = Kind(name, args[place].nbytes, ranks), _now(comm.device)
            result, ended = original(comm, *args, **kwargs), []
            if not isinstance(result, Pending):
                self._add(kind, group, _now(comm.device) - start)
                return result
            wait = result.wait

            def finish() -> None:
                wait()
                if not ended:
                    ended.append(True)
                    self._add(kind, group, _now(comm.device) - start)

            result.wait = finish
            return result

        return timed


_log: CollectiveLog | None = None


def follow(section: CommsLoggerConfig, job: Communicator) -> CollectiveLog:
    """The log of this process. All engines share it, with the first one's settings."""
    global _log
    _log = _log or CollectiveLog(section, job)
    _log.users += 1
    return _log


def log_summary(show_straggler: bool = False) -> None:
    """Print the table of `comms_logger` on rank 0; all ranks call it.

    show_straggler: with a column for the time that rank 0 took longer than the rank that took
    least. Raises UsageError where nothing is recorded."""
    if _log is None:
        raise UsageError("log_summary: set comms_logger.enabled to true, and make an engine before")
    _log.show(show_straggler)


def _now(device: torch.device) -> float:
    if is_accelerator(device):
        compute_stream(device).synchronize()
    return time.perf_counter()


def _size(nbytes: int) -> str:
    value, groups = float(nbytes), ["B", "KB", "MB", "GB", "TB"]
    while value >= 1024 and len(groups) > 1:
        value, groups = value / 1024, groups[1:]
    return f"{value:.4g} {groups[0]}"
