"""Starts the recording that the environment asks for, in a process of the user's script."""

from __future__ import annotations

import os
from pathlib import Path

from zero.tools.profile.bounded_run import bound_first_engine
from zero.tools.profile.command import FOLDER, KIND, STEP
from zero.tools.profile.memory import MemoryRun
from zero.tools.profile.trace import TraceRun


def set_up() -> None:
    """Have `initialize` record a step of the first engine."""
    make = {"trace": TraceRun, "memory": MemoryRun}[os.environ[KIND]]
    folder, step = Path(os.environ[FOLDER]), int(os.environ[STEP])
    bound_first_engine(lambda engine: make(engine, folder, step))
