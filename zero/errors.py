"""How a fault is told: the exception for a user's mistake, and the end of a process, which one rank explains.

Also the release of DeepSpeed that decides what is a mistake. This file knows nothing else of the project.
"""

import os
import sys
import time
from types import TracebackType
from typing import NoReturn

# Its configuration keys and call signatures are followed.
FOLLOWED_RELEASE = "0.19.8"


class UsageError(ValueError, AssertionError):
    """A wrong argument, setting or order of calls; the message says which, and what to do instead.

    DeepSpeed asserts where this package raises: scripts that catch its `AssertionError` go on working.
    """


# By then a launcher has ended the other ranks of one that failed.
_SECONDS_ALONE = 10.0


def _turn_to_tell() -> str:
    """Return this rank's number when it is its turn to tell of a fault.

    Rank 0 tells at once. The launcher then ends the other ranks, which wait here: so a fault that all of them find is
    told once. A rank that is still there after the wait is alone with its fault.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(_SECONDS_ALONE)
    return rank


def refuse(line: str) -> NoReturn:
    """End this process with exit code 2 and `line` on stderr; of several ranks one says it."""
    rank = _turn_to_tell()
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.write(f"[rank {rank}] {line}\n" if rank != "0" else f"{line}\n")
    sys.stderr.flush()
    sys.exit(2)


def end_process_on_exception() -> None:
    """From now on, end this rank's process when an exception reaches the top of its main thread.

    The launcher then stops the other ranks, which wait for this one in a collective. If several ranks fail, one of them
    prints its exception.
    """
    previous = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # torch.distributed calls this with stderr caught in a string, to print it when this returns; it never does.
        sys.stderr = sys.__stderr__
        rank = _turn_to_tell() if issubclass(kind, Exception) else os.environ.get("RANK", "0")
        previous(kind, error, trace)
        print(f"[rank {rank}] {kind.__name__}: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: threads, and destructors of a process group with work in flight, may never come to an end.
        os._exit(1)

    sys.excepthook = end
