"""Command lines of the benchmarks.

Their workers, which may run in another environment, do not import this.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from pathlib import Path
from typing import NoReturn

from zero.tools.arguments import output_file


class Parser(ArgumentParser):
    """Of `python -m benchmarks.NAME`: the help is the module's docstring with its examples; a
    mistake is one line.
    """

    def __init__(self, doc: str | None):
        spec = sys.modules["__main__"].__spec__
        prog = spec and f"python -m {spec.name.removesuffix('.__main__')}"
        super().__init__(prog=prog, description=doc, formatter_class=RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def interpreter(text: str) -> str:
    """The type of an option: a Python interpreter."""
    if shutil.which(text) is None:
        raise ArgumentTypeError(f"{text}: no such program")
    return text


def result_file(text: str) -> Path:
    """The type of an option: a file that can be written, checked before the work.

    Missing folders are made later.
    """
    return output_file(
        text, next(folder for folder in Path(text).resolve().parents if folder.exists())
    )


def existing_folder(text: str) -> Path:
    """The type of an option: a folder that exists and can be written to."""
    try:
        tempfile.TemporaryFile(dir=text).close()
    except OSError as error:
        raise ArgumentTypeError(f"{text}: no folder to write to: {error.strerror}") from None
    return Path(text)
