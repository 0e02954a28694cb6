"""An operation in flight that several threads wait for."""

import threading
import time
from types import SimpleNamespace

import pytest

from zero.comm.work import Pending


def test_two_threads_wait_for_one_result():
    """The result is made once, and neither returns before it is there."""
    made: list[int] = []
    used: list[int] = []
    seen: list[int] = []

    def finish() -> None:
        time.sleep(0.05)
        made.append(1)

    slow = SimpleNamespace(wait=lambda: time.sleep(0.05))
    pending = Pending([slow], finish).observed_by(lambda: used.append(1))

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
        with pytest.raises(OSError):
            pending.wait()
