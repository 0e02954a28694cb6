"""All ranks act together: what one rank finds out all know, and where one fails, all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from zero import checkpoint_folder as folders
from zero.comm import Communicator, default_timeout

T = TypeVar("T")


class Ranks:
    """Object collectives among all ranks in host memory, in which no rank fails alone."""

    _of: WeakKeyDictionary[Communicator, Ranks] = WeakKeyDictionary()

    def __init__(self, comm: Communicator):
        self.rank, self.world_size = comm.rank, comm.world_size
        # A group of its own: on the host whatever the device is, and apart from the messages of training.
        self.group = dist.new_group(backend="gloo", timeout=default_timeout())

    @classmethod
    def of(cls, comm: Communicator) -> Ranks:
        """Those of a communicator; every rank must ask at the same time, the first time."""
        if comm not in cls._of:
            cls._of[comm] = cls(comm)
        return cls._of[comm]

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, what: str, act: Callable[[], T]) -> T:
        """`act()` on every rank; if it fails on any rank, an error naming `what` and that rank on all of them."""
        failure: BaseException | None = None
        failed, result = self.rank, None
        try:
            result = act()
        except dcp.CheckpointException as error:  # is no Exception; DCP raises it on all ranks
            failed, (failure, _) = next(iter(error.failures.items()))
        except Exception as error:
            failure = error
        for report in self.gather(None if failure is None else (failed, *_portable(failure))):
            if report is not None:
                where = f"{what}: rank {report[0]}" if self.world_size > 1 else what
                raise _rebuild(*report[1:], where) from failure
        return result

    def on_first(self, what: str, act: Callable[[], T]) -> T:
        """Rank 0's `act()`, for all ranks."""
        return self.gather(self.together(what, lambda: act() if self.rank == 0 else None))[0]


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
