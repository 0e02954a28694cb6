"""`resume_from_checkpoint=True` after a kill: the Trainer takes the newest folder, whether it is
complete or not.

The Trainer has no callback at these moments. But the interpreter calls an audit hook (PEP 578)
before it lists or makes a folder, or opens a file. So this file renames incomplete folders of a
killed run before transformers looks for the newest one. It refuses a folder that another job has
locked before the Trainer writes to it. It checks a checkpoint that a script names before the
Trainer reads it. Nothing is patched."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from zero.checkpoint.disk import lock
from zero.checkpoint.resumable import TRAINER_STATE, check_named, set_incomplete_aside

_CHECKPOINT = re.compile(r"checkpoint-\d+")


def guard_checkpoints() -> None:
    """Install the audit hook. It stays until the process ends."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple) -> None:
    if event == "open":
        if str(arguments[0]).endswith(TRAINER_STATE) and _called_by("load_from_json", 2):
            check_named(Path(arguments[0]).parent)
    elif event == "os.listdir" and _called_by("get_last_checkpoint", 2):
        set_incomplete_aside(Path(arguments[0]))
    elif event == "os.mkdir" and _called_by("_save", 3) and os.environ.get("RANK", "0") == "0":
        folder = Path(os.fsdecode(arguments[0]))  # made by `Trainer._save`, through `os.makedirs`
        if _CHECKPOINT.fullmatch(folder.name) and folder.parent.is_dir():
            lock(folder.parent)


def _called_by(function: str, depth: int) -> bool:
    return sys._getframe(depth).f_code.co_name == function
