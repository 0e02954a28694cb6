"""Runs the user's command as `zero run` does, with variables that tell its processes what to
record.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zero.errors import UsageError
from zero.tools.arguments import Working

PROGRESS = "step"  # a file in the run's folder with the number of its last step
_POLL = 0.2  # seconds between two looks for new steps
_GRACE = 10.0  # seconds that a launcher has to end its ranks


# For PYTHONPATH: sets the recorder up in each process of the command that imports zero.
STARTUP = str(Path(__file__).parents[1] / "startup")


def run(
    command: list[str],
    recorder: str,
    variables: dict[str, str],
    log: Path,
    what: str,
    progress: Callable[[], str | None],
) -> None:
    """Run the command to its end. What it prints goes to the file `log`, and the last lines of it
    into an error.

    recorder: the module whose `set_up` is called in the command's processes. variables: what it
    reads from the environment. progress: a line for stderr, with the seconds on a terminal; None
    before the first step. what: the run's name."""
    path = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))
    environment = os.environ | variables | {"ZERO_RECORDER": recorder, "PYTHONPATH": path}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "zero", "run", *command],
            env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            with Working("") as working:
                working.show(f"{what}: before its first step")
                while process.poll() is None:
                    time.sleep(_POLL)
                    if line := progress():
                        working.show(line)
        finally:
            signal.signal(signal.SIGTERM, before)
            _end(process)
    if process.returncode:
        raise UsageError(f"{what} failed with code {process.returncode}:\n{what_went_wrong(log)}")


def _end(process: subprocess.Popen) -> None:
    """End what still runs. A launcher gets the time to end its ranks."""
    process.terminate()
    try:
        process.wait(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def what_went_wrong(log: Path) -> str:
    """The lines up to the last that names an exception; a launcher prints its own report after
    it.
    """
    lines = log.read_text(errors="replace").splitlines()
    named = [
        number
        for number, line in enumerate(lines)
        if re.search(r"\b\w+(?<!ChildFailed)(Error|Exception): ", line)
    ]
    last = named[-1] + 1 if named else len(lines)
    return "\n".join(lines[max(0, last - 15) : last])
