"""An operation in flight that several threads wait for."""

from __future__ import annotations

import threading
import time

from zero.comm.work import Pending


class Slow:
    """A work that takes a while."""

    def wait(self) -> None:
        time.sleep(0.05)


def test_two_threads_wait_for_one_result():
    """The result is made once, and neither returns before it is there."""
    made: list[int] = []
    used: list[int] = []
    seen: list[int] = []

    def finish() -> None:
        time.sleep(0.05)
        made.append(1)

    pending = Pending([Slow()], finish).observed_by(lambda: used.append(1))

    def wait() -> None:
        pending.wait()
        seen.append(len(made))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (made, used, seen) == ([1], [1], [1] * 4)


def test_a_failed_wait_fails_again():
    def fail() -> None:
        raise OSError("disk")

    pending = Pending((), fail)
    for _ in range(2):
        try:
            pending.wait()
        except OSError:
            continue
        raise AssertionError("the failure is forgotten")
