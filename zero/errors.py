"""A user's mistake: its exception, a command's end, and the release of DeepSpeed that decides what is one."""

import os
import sys
import time
from typing import NoReturn

# Its configuration keys and call signatures are followed.
FOLLOWED_RELEASE = "0.19.8"


class UsageError(ValueError, AssertionError):
    """A wrong argument, setting or order of calls; the message says which, and what to do instead.

    DeepSpeed asserts where this package raises: scripts that catch its `AssertionError` go on working.
    """


# By then a launcher has ended the other ranks of one that failed.
_SECONDS_ALONE = 10.0


def refuse(line: str) -> NoReturn:
    """End this process with exit code 2 and `line` on stderr.

    Of ranks that find the same fault only rank 0 says so: the launcher ends the others before they do. A rank that is
    still there then is alone with its fault, and names itself.
    """
    if (rank := os.environ.get("RANK", "0")) != "0":
        time.sleep(_SECONDS_ALONE)
        line = f"[rank {rank}] {line}"
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    sys.exit(2)
