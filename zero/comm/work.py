"""An operation in flight: a collective, a copy, a read or a write.

This file does not know which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zero.comm.watchdog import Watchdog


class Pending:
    """An operation in flight. `wait()` may be called more than once.

    Args: works: what to wait for, each with a `wait()`; finish: called once, after these; keep:
    what must not be freed before the end; watchdog: watches the wait for other ranks; what: its
    name in the watchdog's messages."""

    def __init__(
        self,
        works: Sequence = (),
        finish: Callable[[], None] | None = None,
        keep: tuple = (),
        watchdog: Watchdog | None = None,
        what: object = "",
    ):
        self._works = works
        self._finish = finish
        self._keep = keep
        self._watchdog = watchdog
        self._what = what

    def wait(self) -> None:
        if self._works and self._watchdog is not None:
            self._watchdog.wait(self._wait_for_works, self._what)
        else:
            self._wait_for_works()
        if self._finish is not None:
            self._finish()
        self._works = ()
        self._finish = None
        self._keep = ()

    def _wait_for_works(self) -> None:
        for work in self._works:
            work.wait()
