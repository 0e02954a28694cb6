"""Times the engine's collectives for the section `comms_logger`, and prints them as a table.

The time runs from the start of a collective until its result is used, so it includes what is
computed in the meantime. Nothing is waited for earlier than without the log, because ranks may
start collectives in different orders. On an accelerator the host waits for the compute stream at
both ends."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zero.comm.communicator import Communicator
from zero.comm.traffic import Operation, set_observer
from zero.config.monitor import CommsLoggerConfig
from zero.device import compute_stream, is_accelerator
from zero.errors import UsageError, size

# The bus bandwidth by the algorithm's, times (n - 1) / n for n ranks:
# https://github.com/NVIDIA/nccl-tests.
_BUS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
_COLUMNS = ["Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)"]
_COLUMNS += ["tput_avg (Gbps)", "busbw_avg (Gbps)"]


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
    """Adds up the collectives of this process, as long as an engine uses it: see `use_log`."""

    def __init__(self, section: CommsLoggerConfig, job: Communicator):
        self._section = section
        self._job = job
        self.users = 0
        self._calls: Counter[Kind] = Counter()
        self._seconds: defaultdict[Kind, float] = defaultdict(float)
        self._is_printed = True

    def begin(self, operation: Operation) -> Callable[[], None]:
        name = operation.name
        # DeepSpeed's names are longer: `all_gather_into_tensor`.
        is_named = any(given.startswith(name) for given in self._section.prof_ops)
        wanted = self._section.prof_all or is_named
        if operation.ranks == 1 or not wanted:
            return lambda: None
        if self._section.debug and operation.what is not None:
            name = f"{name} | {getattr(operation.what, 'name', operation.what)}"
        kind = Kind(name, operation.tensor.nbytes, operation.ranks)
        start = self._now()
        return lambda: self._add(kind, self._now() - start)

    def _now(self) -> float:
        if is_accelerator(self._job.device):
            compute_stream(self._job.device).synchronize()
        return time.perf_counter()

    def _add(self, kind: Kind, seconds: float) -> None:
        self._calls[kind] += 1
        self._seconds[kind] += seconds
        self._is_printed = False
        if self._section.verbose and self._job.rank == 0:
            rate, bus = kind.rates(seconds)
            print(
                f"comm op: {kind.name} | time (ms): {1000 * seconds:.2f} | msg size: "
                f"{size(kind.nbytes)} | algbw (Gbps): {rate:.2f} | busbw (Gbps): {bus:.2f}",
                file=sys.stderr,
            )

    def lines(self, least: dict[Kind, float] | None = None) -> Iterator[str]:
        """The table. `least`: for one more column, the seconds of the rank that took least."""
        yield _row(_COLUMNS if least is None else [*_COLUMNS, "Straggler(ms)"])
        name = ""
        for kind, total in sorted(self._seconds.items()):
            if kind.name != name:
                name = kind.name
                yield name
            average = total / self._calls[kind]
            numbers = [1000 * total, 1000 * average, *kind.rates(average)]
            if least is not None:
                numbers.append(1000 * (total - least.get(kind, total)))
            first = ["", size(kind.nbytes), str(self._calls[kind])]
            yield _row([*first, *(f"{number:.2f}" for number in numbers)])

    def show(self, with_stragglers: bool = False) -> None:
        """Print the table on rank 0. `with_stragglers`: all ranks must call."""
        least = None
        if with_stragglers:
            seconds = dict(self._seconds)
            tables = self._job.control("comms_logger").exchange(lambda: seconds)
            least = {
                kind: min(table.get(kind, most) for table in tables)
                for kind, most in tables[0].items()
            }
        self._is_printed = True
        if self._job.rank == 0:
            print("\n".join(self.lines(least)), file=sys.stderr, flush=True)

    def leave(self) -> None:
        """An engine stops using it. After the last one, everything not printed yet is printed."""
        global _log
        self.users -= 1
        if self.users:
            return
        _log = None
        set_observer(None)
        if not self._is_printed:
            self.show()


_log: CollectiveLog | None = None


def use_log(section: CommsLoggerConfig, job: Communicator) -> CollectiveLog:
    """The log of this process. All engines share it, with the first one's settings."""
    global _log
    if _log is None:
        _log = CollectiveLog(section, job)
        set_observer(_log.begin)
    _log.users += 1
    return _log


def log_summary(show_straggler: bool = False) -> None:
    """Print the table of `comms_logger` on rank 0; all ranks call it.

    show_straggler: with a column for the time that rank 0 took longer than the rank that took
    least. Raises UsageError where nothing is recorded."""
    if _log is None:
        raise UsageError("log_summary: set comms_logger.enabled to true, and make an engine before")
    _log.show(show_straggler)


def _row(cells: list[str]) -> str:
    return "".join(f"{cell:<20}" for cell in cells).rstrip()
