"""Lets all ranks know at the same step whether any of them has received SIGTERM.

Schedulers send this signal before they stop a job.
"""

from __future__ import annotations

import signal
from types import FrameType

from zero.comm.communicator import communicator

# The exit code that a shell reports for a program that SIGTERM has ended.
EXIT_CODE = 128 + signal.SIGTERM


class SigtermWatch:
    """Notices SIGTERM, so that a loop of your own can save before it ends.

    While it exists, SIGTERM no longer ends this process. Call `seen` after each step; if it returns
    true, save, and exit with `EXIT_CODE`.

        watch = SigtermWatch()
        for batch in batches:
            ...
            engine.step()
            if watch.seen():
                engine.save_checkpoint(folder)
                engine.wait_for_checkpoint()
                sys.exit(EXIT_CODE)

    Create it in the main thread of every rank, after `initialize`.

    Attributes:
        received: whether this rank has received SIGTERM. Other ranks may not know about it yet.
    """

    def __init__(self) -> None:
        self.received = False
        control = communicator().control("waiting for SIGTERM", is_long=True)
        self._ranks = control.wait_for_all()
        self._former = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def seen(self) -> bool:
        """Whether any rank has received SIGTERM. All ranks must call this together, and get the
        same answer.
        """
        return self._ranks.any(self.received)

    def close(self) -> None:
        """Restore the previous handler of SIGTERM."""
        signal.signal(signal.SIGTERM, self._former)
