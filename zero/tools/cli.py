"""usage: zero run SCRIPT.py ARGS...
       zero run LAUNCHER ARGS...
       zero run -m MODULE ARGS...

Runs a script as python would, or any command (torchrun, accelerate launch, trl) or module, with
zero under the name `deepspeed` in it and in all python processes that it starts. The file given by
--deepspeed, --deepspeed_config or --deepspeed_config_file in ARGS is checked first, before
anything is started. With --json before the script, all that it prints goes to stderr, and its exit
code, seconds and memory to stdout.

       zero hook

Prints a folder for PYTHONPATH. With it there, every python process finds zero under that name.
This is for jobs to which only environment variables can be given.

       zero launch [--hostfile FILE] SCRIPT.py ARGS...

Starts a script on all GPUs of this machine, or over ssh on the machines of DeepSpeed's hostfile.

       zero verify [--steps N] SCRIPT.py|LAUNCHER|-m MODULE ARGS...

Runs the first steps on zero and on plain torch, and names the first loss, gradient or parameter
that differs by more than rounding.

       zero doctor [--folder F] [--speeds]
       torchrun --nproc_per_node N -m zero doctor

Checks versions, devices, memory, compiler and disk of this machine; under torchrun also the links
between all ranks. With --speeds, measures what `estimate` and `plan` need to predict times.

       zero trace [--step N] [--out F] SCRIPT.py|LAUNCHER|-m MODULE ARGS...

Runs a script to one step and writes that step as a trace for https://ui.perfetto.dev: compute,
communication, copies, files and late updates of all ranks.

       zero memory [--step N] [--out F.png] SCRIPT.py|LAUNCHER|-m MODULE ARGS...

Runs a script to one step and draws the memory in it by kind: parameters, gradients, optimizer,
activations, buffers.

       zero report RUN [RUN2] [--out F.html]

Makes one HTML page of what `json_monitor` wrote: loss, time, waits, memory, communication,
configuration, warnings.

       zero explain CONFIG

Says what each key of a configuration does, which keys have no effect and why, and what to change
for memory or speed.

       zero estimate MODEL --ds-config CONFIG --world N [--batch B --seq S] [--device-memory GIB]
       [--host-memory GIB]

Says what each process will hold, what it moves in a step and how long that takes, without starting
anything. Where it does not fit: what to change, the fastest first.

       zero plan MODEL --device-memory GIB [--host-memory GIB] [--world N] [--out ds_config.json]

Writes the fastest configuration with which a training fits, says what each key does, and names the
next ones.

       zero inspect CHECKPOINT
       zero consolidate CHECKPOINT OUT [--dtype fp16|bf16|fp32] [--max-file-size GB]

`inspect` shows what a training checkpoint holds, and verifies its checksums. `consolidate` makes a
model folder of it, which `from_pretrained` loads.
CHECKPOINT is a folder such as output/checkpoint-500, or the one named global_step... in it.

Each command has an example under --help, and prints a JSON object with --json. A mistake is one
line and exit code 2. Where the command `zero` is not installed, `python -m zero` is the same.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from zero.checkpoint.models import DTYPES, MAX_FILE_BYTES, consolidate, describe, facts
from zero.config.load import load_config
from zero.errors import UsageError, refuse
from zero.hf import STARTUP, enable
from zero.tools.arguments import (
    Parser,
    Working,
    above_zero,
    check_command,
    count,
    gibibytes,
    output_file,
    program,
)
from zero.tools.doctor.command import doctor
from zero.tools.estimate.question import Question, model_folder, with_batch
from zero.tools.estimate.speeds import DEVICES, GIVEN, chosen
from zero.tools.explain import explain, explain_as_json
from zero.tools.launch import launch, run_aside
from zero.tools.profile.command import memory, trace
from zero.tools.report.command import report
from zero.tools.verify.command import verify

USAGE = f"{__doc__}"  # what `zero --help` prints
CHECKPOINT = "the checkpoint's folder, or the one it lies in"


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line says.

    Exits with code 2 and one line on stderr where it cannot be done.
    """
    match sys.argv[1:] if arguments is None else arguments:
        case [] | ["-h" | "--help", *_]:
            print(USAGE, end="")
        case ["run", *rest]:
            options = _or_refuse(_what_to_run, rest)
            _run(options)  # errors of the script are its own
        case [command, *rest] if command in COMMANDS:
            if (code := _or_refuse(COMMANDS[command], rest)) is not None:
                sys.exit(code)
        case [command, *_]:
            _refuse(f"unknown command '{command}'; see zero --help")


def _or_refuse(command: Callable[[list[str]], Any], arguments: list[str]) -> Any:
    try:
        return command(arguments)
    except OSError as error:
        named = error.filename and error.strerror
        _refuse(f"{error.filename}: {error.strerror}" if named else str(error))
    except ValueError as error:
        _refuse(str(error))


def _what_to_run(arguments: list[str]) -> Namespace:
    parser = Parser(
        "run",
        "Run a script, launcher or module with zero under the name `deepspeed`. With --json, it "
        "prints to stderr.",
        "torchrun --nproc_per_node 2 train.py --deepspeed ds_config.json",
        json="exit code, seconds and memory at the end",
    )
    parser.add_command()
    options = parser.parse(arguments)
    check_command("run", options.command)
    return options


def _run(options: Namespace) -> None:
    """Run a script in this process, which may be a rank of a launcher.

    A command or a module replaces this process.
    """
    target, *arguments = options.command
    path = filter(None, [STARTUP, os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    if options.json:
        done = run_aside([sys.executable, "-m", "zero", "run", *options.command])
        print(json.dumps(done | {"command": options.command}))
        sys.exit(done["exit_code"])
    elif target == "-m":
        os.execv(sys.executable, [sys.executable, "-m", *arguments])
    elif (command := program(target)) is not None:
        os.execv(command, [target, *arguments])
    else:
        _run_script(target, arguments)


def _run_script(script: str, arguments: list[str]) -> None:
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


def _hook(arguments: list[str]) -> None:
    parser = Parser("hook", "Print the folder for PYTHONPATH.", "", json="it")
    print(json.dumps({"folder": STARTUP}) if parser.parse_args(arguments).json else STARTUP)


def _explain(arguments: list[str]) -> None:
    description, example = (
        "Say what each key of a configuration does.",
        "configs/ds_config_zero3.json",
    )
    parser = Parser("explain", description, example, json="it")
    parser.add_argument("config", help="the file ds_config.json, or the YAML of accelerate")
    options = parser.parse_args(arguments)
    print(explain_as_json(options.config) if options.json else explain(options.config))


def _estimate(arguments: list[str]) -> None:
    parser = Parser(
        "estimate",
        "Say what each process will hold, and what it moves in a step over each link.",
        "models/t5-3b --ds-config ds.json --world 8 --batch 4 --seq 512 --device-memory 24G",
        json="the estimate",
    )
    add = parser.add_argument
    add("--ds-config", required=True, help="the file ds_config.json, or the YAML of accelerate")
    _add_question(parser, 0, 0)
    options = parser.parse_args(arguments)
    if options.batch and not options.seq:
        parser.error("--batch needs --seq, the tokens of a sequence")
    question, limits = _asked(options)
    settings = load_config(options.ds_config, allow_auto=True)
    config, question = with_batch(settings, options.ds_config, question)
    with Working("estimate: following one step on fake tensors; large models take a minute"):
        from zero.tools.estimate.report import report  # transformers takes seconds to import

        text = report(options.model, config, question, limits, options.json)
    print(text)


def _plan(arguments: list[str]) -> None:
    parser = Parser(
        "plan",
        "Write the fastest configuration with which a training fits, and say why.",
        "models/llama-8b --device-memory 24G --host-memory 64G",
        json="the configuration",
    )
    out = "the file to write; default: ds_config.json"
    parser.add_argument("--out", type=output_file, default=Path("ds_config.json"), help=out)
    _add_question(parser, 1, 2048)
    options = parser.parse_args(arguments)
    if options.device_memory is None:
        parser.error("name the --device-memory, such as 24G")
    question, limits = _asked(options)
    with Working("plan: following steps on fake tensors; large models take minutes"):
        from zero.tools.estimate.plan import plan  # transformers takes seconds to import

        text = plan(options.model, question, limits, options.out, options.json)
    print(text)


def _add_question(parser: Parser, batch: int, length: int) -> None:
    """Options of what is estimated, with these sequences of a micro-batch and these tokens of a
    sequence if they are not given; 0: they follow from the file, or activations are left out.
    """
    remedies = "what does not fit gets remedies, ordered by predicted time"
    device, host = f"of one device: 24 or 24G; {remedies}", "of the host for one process, likewise"
    sequences = f"sequences of a micro-batch; default: {batch or 'that of the file'}"
    tokens = f"tokens of a sequence; default: {length or 'none, then no activations'}"
    adapter = "train an adapter alone: its folder (PEFT), or a rank: LoRA of all linear layers"
    add = parser.add_argument
    add("model", help="the model's folder with config.json; weights are not read")
    add("--world", type=count, default=1, metavar="N", help="number of processes (1)")
    add("--batch", type=count, default=batch, help=sequences)
    add("--seq", type=count, default=length, help=tokens)
    add("--adapter", default="", metavar="A", help=adapter)
    add("--checkpointing", action="store_true", help="with gradient checkpointing")
    add("--device-memory", type=gibibytes, metavar="GIB", help=device)
    add("--host-memory", type=gibibytes, metavar="GIB", help=host)
    add("--speeds", type=Path, metavar="FILE", help="written by zero doctor --speeds")
    add("--device", metavar="NAMES", help=f"speeds by the makers: {', '.join(DEVICES)}")
    for name in GIVEN:
        unit = "TFLOP/s" if name == "compute" else "GB/s"
        add(f"--{name}-speed", type=above_zero, metavar=unit, help="of one process")


def _asked(options: Namespace) -> tuple[Question, dict[str, int]]:
    """The question, and bytes of memory by place, where a limit is given."""
    given = {name: getattr(options, f"{name}_speed") for name in GIVEN}
    speeds = chosen(options.speeds, options.device, given)
    memory = {"device": options.device_memory, "host": options.host_memory}
    limits = {place: int(size * 2**30) for place, size in memory.items() if size is not None}
    model_folder(options.model)
    sizes = options.world, options.batch, options.seq
    return Question(*sizes, options.checkpointing, speeds, options.adapter), limits


def _inspect(arguments: list[str]) -> None:
    description, example = "Show what a training checkpoint holds.", "output/checkpoint-500"
    parser = Parser("inspect", description, example, json="it")
    parser.add_argument("checkpoint", help=CHECKPOINT)
    options = parser.parse_args(arguments)
    found = facts(options.checkpoint, progress=True)
    print(json.dumps(found, indent=2) if options.json else describe(found))


def _consolidate(arguments: list[str]) -> None:
    parser = Parser(
        "consolidate",
        "Make a model folder for from_pretrained of a checkpoint.",
        "output/checkpoint-500 model --dtype bf16",
        json="the written files",
    )
    dtypes = "of the weights; default: the one they are trained in"
    most = MAX_FILE_BYTES / 1e9
    parser.add_argument("checkpoint", help=CHECKPOINT)
    parser.add_argument("out", help="the folder to write to")
    parser.add_argument("--dtype", choices=DTYPES, help=dtypes)
    parser.add_argument("--max-file-size", type=above_zero, default=most, metavar="GB")
    options = parser.parse_args(arguments)
    dtype, max_file_bytes = DTYPES.get(options.dtype), int(options.max_file_size * 1e9)
    written = consolidate(options.checkpoint, options.out, dtype, max_file_bytes, progress=True)
    files = list(map(str, written))
    print(json.dumps({"files": files}) if options.json else "\n".join(files))


# Each gets its arguments, and returns the exit code or None.
COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "consolidate": _consolidate,
    "doctor": doctor,
    "estimate": _estimate,
    "explain": _explain,
    "hook": _hook,
    "inspect": _inspect,
    "launch": launch,
    "memory": memory,
    "plan": _plan,
    "report": report,
    "trace": trace,
    "verify": verify,
}


def _refuse(message: str) -> NoReturn:
    refuse(f"zero: {message}")


if __name__ == "__main__":
    main()
