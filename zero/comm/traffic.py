"""Counts the bytes that this process has moved over each link, and how long its disk was busy; and
tells an observer of each collective, and of each copy between host memory and the compute device.

`zero/tools/estimate/traffic.py` predicts the same numbers; its note says what is counted. In an
ordinary run there is no observer, and nothing is measured: `comms_logger`
(zero/monitor/collectives.py) sets one for its time. Reads and writes of files are not reported to
it, but `transfer` labels them for the profiler."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from zero.comm.clock import label
from zero.comm.world import Group
from zero.device import is_accelerator

NETWORK, IN, OUT = "network", "host to device", "device to host"
READ, WRITTEN = "disk read", "disk written"
LINKS = (NETWORK, IN, OUT, READ, WRITTEN)
# The part of NETWORK whose receivers are on other machines. Not counted where the launcher does not
# tell.
BETWEEN = "network between machines"

MOVED: Counter[str] = Counter()
_lock = threading.Lock()  # late updates and requests for the disk have threads of their own
# By link: seconds in which some request was under way, the number of those that are, and when the
# first of them began.
_busy: defaultdict[str, float] = defaultdict(float)
_running: Counter[str] = Counter()
_began: dict[str, float] = {}


def _count(link: str, nbytes: int) -> None:
    with _lock:
        MOVED[link] += nbytes


def send(group: Group, sizes: Sequence[int]) -> None:
    """`sizes[i]` bytes go to place i of `group`; its own place does not count."""
    _count(NETWORK, sum(sizes) - sizes[group.rank])
    if group.elsewhere:
        _count(BETWEEN, sum(sizes[place] for place in group.elsewhere))


# How often each part of the full buffer is sent. The sum over replicas is an all-reduce.
_TIMES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "reduce_replicas": 2}


def send_natively(name: str, nbytes: int, group: Group) -> None:
    """`send`, for an accelerator's collective with a full buffer of `nbytes`: each place gets an
    equal part of it.

    Only the collectives on weights and gradients count.
    """
    if times := _TIMES.get(name):
        part = times * nbytes // group.size
        _count(NETWORK, part * (group.size - 1))
        if group.elsewhere:
            _count(BETWEEN, part * len(group.elsewhere))


def note_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target` gets the values of `source`, which may be on the other side of the link between host
    and device.
    """
    if is_accelerator(target.device) != is_accelerator(source.device):
        _count(IN if is_accelerator(target.device) else OUT, target.nbytes)


@contextmanager
def transfer(link: str, nbytes: int) -> Iterator[None]:
    """Context of one request, in any thread. Its bytes are counted when it has succeeded."""
    with _lock:
        _running[link] += 1
        if _running[link] == 1:
            _began[link] = time.perf_counter()
    try:
        with label(f"{link}, {nbytes / 2**20:.1f} MiB"):
            yield
        _count(link, nbytes)
    finally:
        with _lock:
            _running[link] -= 1
            if not _running[link]:
                _busy[link] += time.perf_counter() - _began[link]


def busy_seconds(link: str) -> float:
    """Seconds so far in which at least one request was under way."""
    with _lock:
        return _busy[link] + (time.perf_counter() - _began[link] if _running[link] else 0.0)


# -- who wants to know of each operation


class Operation(NamedTuple):
    """An operation that is about to start.

    Attributes:
        name: "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "load" or
            "store".
        tensor: the full buffer of a collective; what is copied.
        what: the parameter group that it is about, or None.
        ranks: how many take part.
    """

    name: str
    tensor: torch.Tensor
    what: object
    ranks: int


class Observer(Protocol):
    def begin(self, operation: Operation) -> Callable[[], None]:
        """`operation` is about to start. The result is called when its own result is first used."""
        ...


_observer: Observer | None = None


def set_observer(observer: Observer | None) -> None:
    """Tell `observer` of each operation from now on, in place of any other; None: nobody."""
    global _observer
    _observer = observer


def begin(
    name: str, tensor: torch.Tensor, what: object = None, ranks: int = 1
) -> Callable[[], None]:
    """An operation is about to start: see `Operation`. Call the result when its result is used."""
    if _observer is None:
        return _nothing
    return _observer.begin(Operation(name, tensor, what, ranks))


def _nothing() -> None: ...
