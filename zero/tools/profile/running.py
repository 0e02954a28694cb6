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
from pathlib import Path

from zero.errors import UsageError
from zero.tools.arguments import working
from zero.tools.launch import end, python_path

# What a process of the command is told: the folder for its recording, and the last step.
FOLDER, STEPS = "ZERO_RECORDER_FOLDER", "ZERO_RECORDER_STEPS"
# Files in that folder: the number of the last step, and what the command has printed.
PROGRESS, LOG = "step", "log"
# The suffix of torch's own record of a GPU's allocations.
SNAPSHOT = ".pickle"
_POLL = 0.2  # seconds between two looks for new steps
_GRACE = 10.0  # seconds that a launcher has to end its ranks


def run(command: list[str], recorder: str, folder: Path, steps: int, what: str) -> None:
    """Run the command to its end, and show its steps on stderr. Raises UsageError with the last
    lines of what it has printed if it fails.

    recorder: the module whose `set_up` is called in the command's processes. what: the run's name.
    """
    # `zero run` adds its folder for what it starts, but it may become the script itself.
    path = python_path(os.environ.get("PYTHONPATH"))
    variables = {"ZERO_RECORDER": recorder, FOLDER: str(folder), STEPS: str(steps)}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "zero", "run", *command],
            env=os.environ | variables | {"PYTHONPATH": path},
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            with working() as show:
                show(f"{what}: before its first step")
                while process.poll() is None:
                    time.sleep(_POLL)
                    if (file := folder / PROGRESS).exists() and (done := file.read_text()):
                        show(f"{what}: step {done} of {steps}")
        finally:
            signal.signal(signal.SIGTERM, before)
            end([process], _GRACE)
    if process.returncode:
        code = process.returncode
        raise UsageError(f"{what} failed with code {code}:\n{what_went_wrong(folder)}")


def what_went_wrong(folder: Path) -> str:
    """The lines up to the last that names an exception; a launcher prints its own report after
    it.
    """
    lines = (folder / LOG).read_text(errors="replace").splitlines()
    named = [
        number
        for number, line in enumerate(lines)
        if re.search(r"\b\w+(?<!ChildFailed)(Error|Exception): ", line)
    ]
    last = named[-1] + 1 if named else len(lines)
    return "\n".join(lines[max(0, last - 15) : last])
