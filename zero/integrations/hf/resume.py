"""Makes `resume_from_checkpoint=True` work after a kill, although the Trainer takes the newest
folder whether it is complete or not.

The Trainer has no callback at these moments, but the interpreter calls an audit hook (PEP 578)
before it lists or creates a folder, or opens a file. This lets this file rename incomplete folders
of a killed run before transformers looks for the newest one, reject a folder that another job has
locked before the Trainer writes to it, and check a checkpoint that a script names before the
Trainer reads it. Nothing is patched."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from zero.checkpoint.disk import lock
from zero.checkpoint.folder import TRAINER_STATE, check_named, set_incomplete_aside

_CHECKPOINT = re.compile(r"checkpoint-\d+")
# Called before a checkpoint's folder is made: a bounded run (zero/tools/profile) ends there.
before_checkpoint: Callable[[], object] | None = None


def guard_checkpoints() -> None:
    """Install the audit hook. It stays until the process ends."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple) -> None:
    if event == "open":
        if str(arguments[0]).endswith(TRAINER_STATE) and _called_by("load_from_json", 2):
            check_named(Path(arguments[0]).parent)
    elif event == "os.listdir" and _called_by("get_last_checkpoint", 2):
        set_incomplete_aside(Path(arguments[0]))
    elif event == "os.mkdir":
        folder = Path(os.fsdecode(arguments[0]))
        if _CHECKPOINT.fullmatch(folder.name):
            _checkpoint_begins(folder, by_trainer=_called_by("_save", 3))  # through `os.makedirs`


def _checkpoint_begins(folder: Path, by_trainer: bool) -> None:
    if before_checkpoint is not None:
        before_checkpoint()
    if by_trainer and os.environ.get("RANK", "0") == "0" and folder.parent.is_dir():
        lock(folder.parent)


def _called_by(function: str, depth: int) -> bool:
    return sys._getframe(depth).f_code.co_name == function
