"""`python -m zero run SCRIPT.py ARGS...`: run an unmodified training script on zero; and tools for checkpoints.

Under torch's launcher: `torchrun --nproc_per_node N -m zero run SCRIPT.py ARGS...`.
"""

from __future__ import annotations

import math
import runpy
import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from zero.checkpoint.model import DTYPES, MAX_FILE_BYTES
from zero.checkpoint.offline import consolidate, describe
from zero.config import load_config
from zero.errors import UsageError, refuse
from zero.hf import enable

USAGE = """\
usage: python -m zero run SCRIPT.py ARGS...
       torchrun --nproc_per_node N -m zero run SCRIPT.py ARGS...

Runs SCRIPT.py as python would, with zero under the name `deepspeed` for transformers and accelerate. The file given
by --deepspeed or --deepspeed_config in ARGS is checked first, before the script builds a model.

       python -m zero inspect CHECKPOINT
       python -m zero consolidate CHECKPOINT OUT [--dtype fp16|bf16|fp32] [--max-file-size GB]

Show what a training checkpoint holds, checksums verified; make of one a folder that `from_pretrained` loads.
CHECKPOINT is a folder such as output/checkpoint-500, or the one named global_step... in it.
"""


def main(arguments: list[str]) -> None:
    """Do what the command line says; `SystemExit(2)` with one line on stderr where it cannot be done."""
    match arguments:
        case [] | ["-h" | "--help", *_] | ["run", "-h" | "--help"]:
            print(USAGE, end="")
        case ["run", script, *script_arguments]:
            _run(script, script_arguments)
        case ["run"]:
            _refuse("run: no script given; usage: python -m zero run SCRIPT.py ARGS...")
        case ["inspect" | "consolidate" as command, *rest]:
            try:
                _use_checkpoint(command, rest)
            except (ValueError, OSError) as error:
                _refuse(str(error))
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
    try:
        runpy.run_path(script, run_name="__main__")
    except UsageError as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        refuse(f"{script}, line {lines[-1] if lines else '?'}: {error}")


def _configurations(arguments: list[str]) -> Iterator[str]:
    """The values of the options that name a configuration; to some scripts `--deepspeed` alone is a switch."""
    for argument, following in pairwise([*arguments, "-"]):
        option, equals, value = argument.partition("=")
        if option in ("--deepspeed", "--deepspeed_config"):
            if equals:
                yield value
            elif not following.startswith("-"):
                yield following


def _use_checkpoint(command: str, arguments: list[str]) -> None:
    parser = ArgumentParser(prog=f"python -m zero {command}")
    parser.add_argument("checkpoint", help="the checkpoint's folder, or the one it lies in")
    if command == "inspect":
        parser.description = "Show what a training checkpoint holds."
        print(describe(parser.parse_args(arguments).checkpoint))
        return
    parser.description = "Make a model folder for from_pretrained of a checkpoint."
    parser.add_argument("out", help="the folder to write to")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: the one they are trained in")
    parser.add_argument("--max-file-size", type=_gigabytes, default=MAX_FILE_BYTES / 1e9, metavar="GB")
    options = parser.parse_args(arguments)
    dtype, max_file_bytes = DTYPES.get(options.dtype), int(options.max_file_size * 1e9)
    print(*consolidate(options.checkpoint, options.out, dtype, max_file_bytes, progress=True), sep="\n")


def _gigabytes(text: str) -> float:
    number = float(text)
    if not (number > 0 and math.isfinite(number)):
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _refuse(message: str) -> NoReturn:
    refuse(f"zero: {message}")


if __name__ == "__main__":
    main(sys.argv[1:])
