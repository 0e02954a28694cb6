"""`python -m zero run SCRIPT.py ARGS...`: run an unmodified training script on zero.

Under torch's launcher: `torchrun --nproc_per_node N -m zero run SCRIPT.py ARGS...`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from zero.config import load_config
from zero.hf import enable

USAGE = """\
usage: python -m zero run SCRIPT.py ARGS...
       torchrun --nproc_per_node N -m zero run SCRIPT.py ARGS...

Runs SCRIPT.py as python would, with zero under the name `deepspeed` for transformers and accelerate. The file given
by --deepspeed or --deepspeed_config in ARGS is checked first, before the script builds a model.
"""

_CONFIG_OPTIONS = ("--deepspeed", "--deepspeed_config")


def main(arguments: list[str]) -> None:
    """Do what the command line says; `SystemExit(2)` with one line on stderr where it cannot be done."""
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(USAGE, end="")
        case ["run", "-h" | "--help"]:
            print(USAGE, end="")
        case ["run", script, *script_arguments]:
            _run(script, script_arguments)
        case ["run"]:
            _refuse("run: no script given; usage: python -m zero run SCRIPT.py ARGS...")
        case [command, *_]:
            _refuse(f"unknown command '{command}'; usage: python -m zero run SCRIPT.py ARGS...")


def _run(script: str, arguments: list[str]) -> None:
    if not Path(script).is_file():
        _refuse(f"run: no such script: {script}")
    for config in _configurations(arguments):
        try:
            load_config(config, allow_auto=True)
        except (ValueError, OSError) as error:
            _refuse(str(error))
    enable()
    sys.argv = [script, *arguments]
    # `-m` put the working directory first; a script has its own folder there. With -P neither is wanted.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _configurations(arguments: list[str]) -> list[str]:
    """The values of the options that name a configuration; to some scripts `--deepspeed` alone is a switch."""
    values = []
    for position, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option not in _CONFIG_OPTIONS:
            continue
        if not equals:
            value = arguments[position + 1] if position + 1 < len(arguments) else ""
        if value and not (value.startswith("-") and not equals):
            values.append(value)
    return values


def _refuse(message: str) -> None:
    print(f"zero: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
