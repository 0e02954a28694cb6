"""An operation in flight: a collective, a copy, a read or a write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from zero.comm.watchdog import Watchdog


class Waitable(Protocol):
    def wait(self) -> object: ...


@dataclass(eq=False, repr=False)
class Pending:
    """An operation in flight. Any thread may call `wait()`, more than once.

    Args:
        works: what to wait for.
        finish: called once, after these.
        keep: what must not be freed before the end.
        watchdog: watches the wait for other ranks, which is then the main thread's.
        what: its name in the watchdog's messages.
    """

    works: Sequence[Waitable] = ()
    finish: Callable[[], None] | None = None
    keep: tuple = ()
    watchdog: Watchdog | None = None
    what: object = ""

    def __post_init__(self) -> None:
        self._observed: Callable[[], None] | None = None
        # A second thread must neither run `finish` again nor return before the first one has.
        self._lock = threading.Lock()

    def observed_by(self, used: Callable[[], None]) -> Pending:
        """Have the first `wait` call `used` at its end. Returns this object."""
        self._observed = used
        return self

    def wait(self) -> None:
        with self._lock:
            if self.works and self.watchdog is not None:
                self.watchdog.wait(self._wait_for_works, self.what)
            else:
                self._wait_for_works()
            if self.finish is not None:
                self.finish()
            self.finish = None
            self.keep = ()
            if self._observed is not None:
                self._observed()
                self._observed = None

    def _wait_for_works(self) -> None:
        while self.works:
            self.works[0].wait()
            # One by one: if `finish` fails, or another work, whoever waits again must not wait for
            # this one again. A message of gloo would then never end.
            self.works = self.works[1:]
