"""Threads of the engine, all of which have ended when the interpreter ends.

The interpreter stops a thread that is left at its end as soon as that asks for the interpreter's
lock. Inside of torch's C++ code this aborts the process: a run that has succeeded would end with
exit code 134."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

logger = logging.getLogger("zero")

# Seconds after which a process that ends says what it is waiting for.
PATIENCE = 10.0

_started: dict[EngineThread, None] = {}


class EngineThread(threading.Thread):
    """A thread that the end of the interpreter waits for.

    Args:
        act, arguments: what it calls.
        name: tells the user what is waited for.
        end: called at exit, to have the thread end soon. Without it, the thread completes its work.
        daemon: False if Python itself is to wait as well, before all exit handlers.
    """

    def __init__(
        self,
        act: Callable[..., object],
        *arguments: object,
        name: str,
        end: Callable[[], object] | None = None,
        daemon: bool = True,
    ):
        super().__init__(target=act, args=arguments, name=name, daemon=daemon)
        self._end = end

    def start(self) -> None:
        super().start()
        _started[self] = None  # here, and not in the thread: the interpreter may end at once
        for thread in list(_started):
            if not thread.is_alive():
                _started.pop(thread, None)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._end = None  # which may hold an engine

    def finish(self) -> None:
        """At exit, wait until this thread has ended; another Ctrl-C then ends the process at
        once.
        """
        try:
            if (end := self._end) is not None:
                end()
            self.join(PATIENCE)
            if self.is_alive():
                text = 'this process ends when its thread "%s" has ended; Ctrl-C ends it at once'
                logger.warning(text, self.name)
                self.join()
        except KeyboardInterrupt:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + signal.SIGINT)


@atexit.register
def _finish_all() -> None:
    """The newest first, because it may need those that were there before it."""
    while running := [thread for thread in list(_started) if thread.is_alive()]:
        running[-1].finish()
