"""The command `zero`: its table of commands, and how it starts one of them.

A command is imported when it is called, so that the others do not wait for what it imports.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import zero
from zero.errors import DamagedCheckpointError, nearest, refuse
from zero.tools.arguments import COMMANDS, GOALS

_LISTED = "\n".join(
    line
    for goal, commands in GOALS.items()
    for line in ("", goal, *(f"  {name:<12} {each['line']}" for name, each in commands.items()))
)
USAGE = f"""usage: zero COMMAND ARGUMENTS...
{_LISTED}

zero COMMAND --help shows all options and an example. With --json, estimate, plan, explain, doctor
and inspect print a JSON object. A mistake gives one line and exit code 2, a damaged checkpoint exit
code 1. `python -m zero` does the same as `zero`.
"""


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line says.

    Exits with code 2 and one line on stderr where it cannot be done.
    """
    match sys.argv[1:] if arguments is None else arguments:
        case [] | ["-h" | "--help", *_]:
            print(USAGE, end="")
        case ["--version", *_]:
            print(f"zero {zero.__version__}")
        case [name, *rest] if name in COMMANDS:
            with _in_one_line(), _without_torchao():
                result = command(name)(rest)
            if callable(result):  # `zero run`: the errors of a script are its own
                result()
                return
            if result is not None:
                sys.exit(result)
        case [name, *_]:
            kind = "option" if name.startswith("-") else "command"
            meant = nearest(name, [*COMMANDS, "--help", "--version"])
            if name.endswith(".py"):
                meant = f"zero run {name}"
            remedy = f"did you mean {meant}?" if meant else "see zero --help"
            _refuse(f"unknown {kind} '{name}'; {remedy}")


def deepspeed() -> None:
    """What the command `deepspeed` does here."""
    main(["launch", *sys.argv[1:]])


def ds_report() -> None:
    """What the command `ds_report` does here. Its options hide parts of DeepSpeed's report."""
    main(["doctor"])


def command(name: str) -> Callable[[list[str]], Any]:
    """The function of a command."""
    module, _, function = COMMANDS[name]["home"].partition(":")
    return getattr(importlib.import_module(f"zero.tools.{module}"), function)


@contextmanager
def _without_torchao() -> Iterator[None]:
    """Context in which torchao counts as not installed. transformers would import it, which takes
    seconds and prints which of its files do not fit torch, and no command needs it.
    """
    hidden: Any = sys.modules.setdefault("torchao", cast(Any, None))
    try:
        yield
    finally:
        if hidden is None:
            del sys.modules["torchao"]


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Context whose errors of the user's are printed as one line."""
    try:
        yield
    except OSError as error:
        named = error.filename and error.strerror
        _refuse(f"{error.filename}: {error.strerror}" if named else str(error))
    except DamagedCheckpointError as error:
        _refuse(str(error), 1)  # the command itself has no mistake
    except ValueError as error:
        _refuse(str(error))


def _refuse(message: str, code: int = 2) -> NoReturn:
    refuse(f"zero: {message}", code)


if __name__ == "__main__":
    main()
