"""The command `zero`, or `python -m zero`: run an unmodified training script or its launcher; tools for checkpoints."""

from __future__ import annotations

import math
import os
import runpy
import shutil
import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from zero.checkpoint.model import DTYPES, MAX_FILE_BYTES
from zero.checkpoint.offline import consolidate, describe
from zero.config import load_config
from zero.config.explain import explain, explain_as_json
from zero.errors import UsageError, refuse
from zero.hf import STARTUP, enable
from zero.launch import launch
from zero.verify.command import verify

USAGE = """\
usage: zero run SCRIPT.py ARGS...
       zero run LAUNCHER ARGS...
       zero run -m MODULE ARGS...

Runs a script as python would, or any command (torchrun, accelerate launch, trl) or module, with zero under the name
`deepspeed` in it and in all python processes that it starts. The file given by --deepspeed, --deepspeed_config or
--deepspeed_config_file in ARGS is checked first, before anything is started.

       zero hook

Prints a folder for PYTHONPATH. With it there, every python process finds zero under that name. This is for jobs to
which only environment variables can be given.

       zero launch [--hostfile FILE] SCRIPT.py ARGS...

Starts a script on all GPUs of this machine, or over ssh on the machines of DeepSpeed's hostfile.

       zero verify [--steps N] SCRIPT.py|LAUNCHER|-m MODULE ARGS...

Runs the first steps twice, on zero and on plain torch, and names the first loss, gradient or parameter that differs.

       zero explain CONFIG [--json]

Says what each key of a configuration does, which keys have no effect and why, and what to change for memory or speed.

       zero estimate MODEL --ds-config CONFIG --world N [--batch B --seq S] [--device-memory GB]

Says what each process will hold, without starting anything, and what to change where that does not fit.

       zero inspect CHECKPOINT
       zero consolidate CHECKPOINT OUT [--dtype fp16|bf16|fp32] [--max-file-size GB]

`inspect` shows what a training checkpoint holds, and verifies its checksums. `consolidate` makes a model folder of it,
which `from_pretrained` loads.
CHECKPOINT is a folder such as output/checkpoint-500, or the one named global_step... in it.

Where the command `zero` is not installed, `python -m zero` is the same.
"""
USAGE_OF_RUN = "usage: zero run SCRIPT.py|LAUNCHER|-m MODULE ARGS..."


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line says; `SystemExit(2)` with one line on stderr where it cannot be done."""
    match sys.argv[1:] if arguments is None else arguments:
        case [] | ["-h" | "--help", *_] | ["run", "-h" | "--help"]:
            print(USAGE, end="")
        case ["run"] | ["run", "-m"]:
            _refuse(f"run: no script, launcher or module given; {USAGE_OF_RUN}")
        case ["run", target, *rest]:
            _check_configurations(rest)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))
            _run(target, rest)
        case ["verify" | "launch" as command, *rest]:
            try:
                sys.exit({"verify": verify, "launch": launch}[command](rest))
            except (ValueError, OSError) as error:
                _refuse(str(error))
        case ["hook"]:
            print(STARTUP)
        case ["inspect" | "consolidate" | "explain" | "estimate" as command, *rest]:
            act = {"explain": _explain, "estimate": _estimate}.get(command, partial(_use_checkpoint, command))
            try:
                act(rest)
            except (ValueError, OSError) as error:
                _refuse(str(error))
        case [command, *_]:
            _refuse(f"unknown command '{command}'; {USAGE_OF_RUN}")


def _run(target: str, arguments: list[str]) -> None:
    """Run a script in this process, which may be a rank of a launcher. A command or a module replaces this process."""
    beside = os.path.dirname(sys.executable)  # the virtual environment need not be activated
    command = shutil.which(target, path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if target == "-m":
        os.execv(sys.executable, [sys.executable, "-m", *arguments])
    elif command is not None and not target.endswith(".py"):
        os.execv(command, [target, *arguments])
    elif Path(target).is_file():
        _run_script(target, arguments)
    else:
        _refuse(f"run: no such script, nor a command of this name: {target}")


def _run_script(script: str, arguments: list[str]) -> None:
    enable()
    sys.argv = [script, *arguments]
    # The first entry is the working directory (`-m`), or the folder of the command `zero`. For a script, Python has the
    # script's folder there, unless it runs with -P.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except UsageError as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        refuse(f"{script}, line {lines[-1] if lines else '?'}: {error}")


def _check_configurations(arguments: list[str]) -> None:
    for config in _configurations(arguments):
        try:
            load_config(config, allow_auto=True)
        except (ValueError, OSError) as error:
            _refuse(str(error))


def _configurations(arguments: list[str]) -> Iterator[str]:
    """The values of the options that name a configuration; to some scripts `--deepspeed` alone is a switch."""
    for argument, following in pairwise([*arguments, "-"]):
        option, equals, value = argument.partition("=")
        if option in ("--deepspeed", "--deepspeed_config", "--deepspeed_config_file"):
            if equals:
                yield value
            elif not following.startswith("-"):
                yield following


def _explain(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="zero explain", description="Say what each key of a configuration does.")
    parser.epilog = "Example: zero explain configs/ds_config_zero3.json"
    parser.add_argument("config", help="the file ds_config.json")
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    options = parser.parse_args(arguments)
    print(explain_as_json(options.config) if options.json else explain(options.config))


def _estimate(arguments: list[str]) -> None:
    from zero.estimate import Question, report  # transformers takes seconds to import

    parser = ArgumentParser(prog="zero estimate", description="Say how much memory each process will take.")
    parser.epilog = "Example: zero estimate t5-3b --ds-config ds.json --world 8 --batch 4 --seq 512 --device-memory 24"
    parser.add_argument("model", help="the model's folder with config.json; weights are not read")
    parser.add_argument("--ds-config", required=True, help="the file ds_config.json")
    parser.add_argument("--world", type=_count, default=1, metavar="N", help="number of processes")
    parser.add_argument("--batch", type=_count, default=0, help="sequences of a micro-batch on one process")
    parser.add_argument("--seq", type=_count, default=0, help="tokens of a sequence")
    parser.add_argument("--checkpointing", action="store_true", help="with gradient checkpointing")
    parser.add_argument("--device-memory", type=_gigabytes, metavar="GB", help="of one device, in GiB")
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    options = parser.parse_args(arguments)
    if bool(options.batch) != bool(options.seq):
        parser.error("--batch and --seq belong together")
    memory = None if options.device_memory is None else int(options.device_memory * 2**30)
    question = Question(options.world, options.batch, options.seq, options.checkpointing)
    print(report(options.model, options.ds_config, question, memory, options.json))


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return int(text)


def _use_checkpoint(command: str, arguments: list[str]) -> None:
    parser = ArgumentParser(prog=f"zero {command}")
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
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _refuse(message: str) -> NoReturn:
    refuse(f"zero: {message}")


if __name__ == "__main__":
    main()
