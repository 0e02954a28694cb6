"""Starts what the environment asks a process of the user's script to record."""

from __future__ import annotations

import os
from pathlib import Path

from zero.tools.profile import memory, trace
from zero.tools.profile.brief import follow
from zero.tools.profile.command import FOLDER, KIND, STEP


def set_up() -> None:
    """Have `initialize` record a step of the first engine."""
    make = {"trace": trace.TraceRun, "memory": memory.MemoryRun}[os.environ[KIND]]
    folder, step = Path(os.environ[FOLDER]), int(os.environ[STEP])
    follow(lambda engine: make(engine, folder, step))
