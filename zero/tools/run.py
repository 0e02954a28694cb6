"""The commands `zero run` and `zero hook`, with which `import deepspeed` imports zero.

A launcher that `zero run` starts replaces this process, so nothing here imports torch before.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from zero.errors import UsageError, refuse
from zero.integrations.hf import STARTUP
from zero.tools.arguments import Parser, check_command, program
from zero.tools.launch import python_path


def run(arguments: list[str]) -> Callable[[], None]:
    """Check what `zero run ARGUMENTS` names, and return what runs it, whose errors are its own."""
    options = Parser("run").parse(arguments)
    check_command("run", options.command)
    return partial(_run, *options.command)


def _run(target: str, *arguments: str) -> None:
    """Run a script in this process, which may be a rank of a launcher.

    A command or a module replaces this process.
    """
    os.environ["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH"))
    if target == "-m":
        os.execv(sys.executable, [sys.executable, "-m", *arguments])
    elif (command := program(target)) is not None:
        os.execv(command, [command, *arguments])  # Python finds its packages by this name
    else:
        _run_script(target, arguments)


def _run_script(script: str, arguments: Sequence[str]) -> None:
    from zero.hf import enable  # here: it imports torch

    enable()
    sys.argv = [script, *arguments]
    # The first entry is the working directory (`-m`), or the folder of the command `zero`. For a
    # script, Python has the script's folder there, unless it runs with -P.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except UsageError as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == script]
        refuse(f"{script}, line {lines[-1] if lines else '?'}: {error}")


def hook(arguments: list[str]) -> None:
    """Run `zero hook ARGUMENTS`."""
    Parser("hook").parse_args(arguments)
    print(STARTUP)
