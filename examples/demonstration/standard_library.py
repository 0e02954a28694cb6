"""The corpus of the demonstration of run_distill.py: the Python standard library's own source."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

from translation.records import InputError

# Not used: tests, bundled tools, data tables written as code.
_LEFT_OUT = {
    "test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "turtledemo",
    "ensurepip", "encodings",
    "pydoc_data", "__pycache__", "_vendor", "config",
}  # fmt: skip
_LONGEST = 200_000  # characters
_HELD_OUT_OF = 12  # one file in 12 is held out


class Corpus(NamedTuple):
    """Source files: for training, and held out."""

    train: list[str]
    held_out: list[str]


def standard_library() -> Corpus:
    """Read the running Python's standard library. Only the name of a file decides whether it is
    held out.

    Raises:
        InputError: this Python has no source of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    corpus = Corpus([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _LEFT_OUT & set(name.parts) or path.stat().st_size > _LONGEST:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        bucket = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % _HELD_OUT_OF
        (corpus.held_out if bucket == 0 else corpus.train).append(text)
    if not corpus.train or not corpus.held_out:
        raise InputError(
            f"no source files in {root}: this Python has no library source; give --train_file "
            "instead"
        )
    return corpus
