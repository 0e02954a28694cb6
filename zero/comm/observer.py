"""Reports collectives, and copies between host memory and the compute device, to those who want to
know.

In an ordinary run nobody does, and nothing is measured. `comms_logger`
(zero/monitor/collectives.py) sets an observer for its time. Reads and writes of files are not
reported here: `zero.comm.traffic.transfer` labels them for the profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


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
