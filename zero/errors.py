"""The exception for a user's mistake, the word that was meant by it, how numbers are written for
people, and how a failed process ends, so that only one rank prints the error.

Also the release of DeepSpeed that zero follows. This file knows nothing else of the project.
"""

import difflib
import math
import os
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import NoReturn

# Its configuration keys and call signatures are followed.
FOLLOWED_RELEASE = "0.19.8"


class UsageError(ValueError, AssertionError):
    """A wrong argument, setting or order of calls; the message says which, and what to do instead.

    An AssertionError as well, because scripts for DeepSpeed catch its refusals as such."""


def require_divisor(key: str, size: int, what: str, number: int) -> None:
    """Raise UsageError unless `size`, which `key` sets, divides `number`."""
    if size < 1 or number % size:
        raise UsageError(f"{key}: {size} does not divide {what}, {number}")


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing or is not what was written."""


def nearest(given: str, names: Iterable[str], cutoff: float | None = None) -> str:
    """The one of `names` of which `given` is a misspelling, or "".

    In a misspelling one letter is changed, missing, added or moved; in a long name, several may be.
    """
    spelt = {name.lower().replace("-", "_"): name for name in names}
    wrong = given[:100].lower().replace("-", "_")
    if cutoff is None and len(wrong) > 8:
        cutoff, spelt = 0.75, {key: name for key, name in spelt.items() if len(key) >= 8}
    elif cutoff is None:
        cutoff = 1 - 1 / max(len(wrong), 2) - 1e-9
    return spelt.get(
        next(iter(difflib.get_close_matches(wrong, spelt, n=1, cutoff=cutoff)), ""), ""
    )


def rounded(value: float, digits: int = 3) -> str:
    """The number with at most so many digits, as a person would write it: 0.026, 2.5, 39,700."""
    if not value:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, places):,.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float) -> str:
    """A number of bytes, as a person would write it: 0, 512 B, 1.5 MiB, 22.9 GiB."""
    if not nbytes:
        return "0"
    power = min(int(math.log(max(nbytes, 1), 1024)), len(_UNITS) - 1)
    amount = nbytes / 1024**power
    return f"{rounded(amount, 3 if amount < 1000 else 4)} {_UNITS[power]}"


# Within this time a launcher ends the other ranks after one has failed.
_SECONDS_ALONE = 10.0


def _wait_to_print() -> str:
    """Wait until this rank should print its error, and return its number.

    Rank 0 prints at once. Then the launcher ends the other ranks, which wait here. So an error that
    all ranks have is printed once. If a rank still runs after the wait, it alone has failed."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(_SECONDS_ALONE)
    return rank


def refuse(line: str, code: int = 2) -> NoReturn:
    """End this process with this exit code and `line` on stderr; of several ranks one prints it."""
    rank = _wait_to_print()
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.write(f"[rank {rank}] {line}\n" if rank != "0" else f"{line}\n")
    sys.stderr.flush()
    sys.exit(code)


def end_process_on_exception() -> None:
    """From now on, end this rank's process when an exception reaches the top of its main thread.

    The launcher then stops the other ranks, which wait for this one in a collective. If several
    ranks fail, one of them prints its exception."""
    previous = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # torch.distributed redirects stderr to a string while it calls this, and prints it when
        # this returns: never.
        sys.stderr = sys.__stderr__
        rank = _wait_to_print() if issubclass(kind, Exception) else os.environ.get("RANK", "0")
        previous(kind, error, trace)
        print(f"[rank {rank}] {kind.__name__}: {error}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as under pythonw, or where a script closed it
                stream.flush()
        # Not sys.exit: threads, and the destructor of a process group with work in flight, may
        # block for ever.
        os._exit(1)

    sys.excepthook = end
