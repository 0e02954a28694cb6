"""usage: zero run SCRIPT.py ARGS...
       zero run LAUNCHER ARGS...
       zero run -m MODULE ARGS...

Runs a script, a module or any command, such as torchrun, accelerate launch or trl. In it, and in
all Python processes that it starts, `import deepspeed` imports zero. The configuration that ARGS
name (--deepspeed, --deepspeed_config or --deepspeed_config_file) is checked before anything starts.
With --json before the script, everything that it prints goes to stderr; exit code, seconds and
memory go to stdout.

       zero hook

Prints a folder to put into PYTHONPATH, which has the same effect. Use it for jobs in which you
can only set environment variables.

       zero launch [--hostfile FILE] SCRIPT.py ARGS...

Starts a script on all GPUs of this machine, or over ssh on the machines of a hostfile, which has
DeepSpeed's format.

       zero verify [--steps N] SCRIPT.py|LAUNCHER|-m MODULE ARGS...

Runs the first steps of a script on zero and on plain torch, and names the first loss, gradient or
parameter that differs by more than rounding.

       zero doctor [--folder F] [--speeds]
       torchrun --nproc_per_node N -m zero doctor

Checks versions, devices, memory, compiler and disk of this machine, and prints a remedy for each
problem. Under torchrun it also measures the links between the ranks. With --speeds it measures
what `estimate` and `plan` need to predict times.

       zero trace [--step N] [--out F] SCRIPT.py|LAUNCHER|-m MODULE ARGS...

Runs a script up to one step, and writes a trace of that step for https://ui.perfetto.dev. It shows
computation, communication, copies, files and background updates of all ranks.

       zero memory [--step N] [--out F.png] SCRIPT.py|LAUNCHER|-m MODULE ARGS...

Runs a script up to one step, and draws how much memory parameters, gradients, optimizer state,
activations and buffers take during that step.

       zero report RUN [RUN2] [--out F.html]

Makes an HTML page from the records of `json_monitor`: loss, time, waits, memory, communication,
configuration and warnings of one run, or of two side by side.

       zero explain CONFIG

Says what each key of a configuration does, and which keys have no effect and why.

       zero estimate MODEL --ds-config CONFIG --world N [--batch B --seq S] [--device-memory GIB]
       [--host-memory GIB]

Predicts how much memory each process will need, how many bytes it moves in a step, and how long a
step takes. No GPU is needed. If the run does not fit, it says what to change, fastest first.

       zero plan MODEL --device-memory GIB [--host-memory GIB] [--world N] [--out ds_config.json]

Writes the fastest configuration with which training fits, says what each key does, and names the
next best configurations.

       zero inspect CHECKPOINT
       zero consolidate CHECKPOINT OUT [--dtype fp16|bf16|fp32] [--max-file-size GB] [--merge BASE]

`inspect` shows what a training checkpoint contains, and verifies its checksums. `consolidate` turns
it into a model folder for `from_pretrained`; if it is one of adapters, into a folder for
`PeftModel.from_pretrained`, or with --merge into the model in BASE with the adapter merged into it.
CHECKPOINT is a folder such as output/checkpoint-500, or the folder global_step... inside it.

       zero adopt FOLDER [OUT]
       zero convert CHECKPOINT --to deepspeed|dcp|hf [OUT]

`adopt` makes a checkpoint of zero from one of another engine: DeepSpeed, FSDP, or the Trainer
without any. `convert` writes one of zero as another engine loads it. Both say what is not carried
over, and change nothing in the folder that they read.

`zero COMMAND --help` shows all options and an example. With --json, a command prints a JSON object.
A mistake gives one line and exit code 2. If the command `zero` is not installed, use
`python -m zero`.
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

from zero.checkpoint.merging import merge
from zero.checkpoint.models import DTYPES, MAX_FILE_BYTES, consolidate, describe, facts
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
from zero.tools.convert import adopt, convert
from zero.tools.doctor.command import doctor
from zero.tools.estimate.question import Question, model_folder, with_batch
from zero.tools.estimate.speeds import DEVICES, GIVEN, chosen
from zero.tools.explain import explain, explain_as_json, load
from zero.tools.launch import launch, run_aside
from zero.tools.profile.command import memory, trace
from zero.tools.report.command import report
from zero.tools.verify.command import verify

USAGE = f"{__doc__}"  # what `zero --help` prints
CHECKPOINT = "folder of the checkpoint, or the folder that contains it"


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
    description = "Say what each key of a configuration does."
    parser = Parser("explain", description, "configs/ds_config_zero3.json", json="it")
    parser.add_argument("config", help="ds_config.json, or the YAML file of accelerate")
    options = parser.parse_args(arguments)
    print(explain_as_json(options.config) if options.json else explain(options.config))


def _estimate(arguments: list[str]) -> None:
    parser = Parser(
        "estimate",
        "Predict how much memory each process will need, how many bytes it moves over each link in "
        "a step, and how long a step takes.",
        "models/t5-3b --ds-config ds.json --world 8 --batch 4 --seq 512 --device-memory 24G",
        json="the estimate",
    )
    add = parser.add_argument
    add("--ds-config", required=True, help="the file ds_config.json, or the YAML of accelerate")
    _add_question(parser, 0, 0)
    teacher = "folder of a frozen model that the model learns from, as in run_distill.py"
    add("--teacher", metavar="MODEL", help=teacher)
    beside = "the teacher's ds_config.json; default: as run_distill.py makes it from --ds-config"
    add("--teacher-ds-config", metavar="CONFIG", help=beside)
    add("--teacher-bits", type=int, choices=(4, 8), help="its linear layers are quantized")
    options = parser.parse_args(arguments)
    if options.batch and not options.seq:
        parser.error("--batch needs --seq, the tokens of a sequence")
    if options.teacher is None and (options.teacher_ds_config or options.teacher_bits):
        parser.error("--teacher-ds-config and --teacher-bits need --teacher")
    question, limits = _asked(options)
    settings = load(options.ds_config)
    config, question = with_batch(settings, options.ds_config, question)
    teacher = None
    if options.teacher is not None:
        beside = options.teacher_ds_config and load(options.teacher_ds_config)
        teacher = (options.teacher, beside or None, options.teacher_bits)
    with Working("estimate: following one step on fake tensors; large models take a minute"):
        from zero.tools.estimate.report import report  # transformers takes seconds to import

        text = report(options.model, config, question, limits, options.json, teacher)
    print(text)


def _plan(arguments: list[str]) -> None:
    parser = Parser(
        "plan",
        "Write the fastest configuration with which training fits, and say why.",
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
    """Options that say what to estimate. `batch` (sequences per micro-batch) and `length` (tokens
    per sequence) are the defaults; 0: take them from the file, or leave out activations.
    """
    remedies = "if the run does not fit, remedies are printed, ordered by predicted time"
    device = f"memory of one device: 24 or 24G; {remedies}"
    host = "memory of one host, which its processes share; remedies stay within it, too"
    per_host = "processes on one host; default: all of them"
    sequences = f"sequences per micro-batch; default: {batch or 'as in the file'}"
    tokens = f"tokens per sequence; default: {length or 'none, and activations are left out'}"
    adapter = "train only an adapter: its folder (PEFT), or a rank for LoRA on all linear layers"
    add = parser.add_argument
    add("model", help="the model's folder with config.json; weights are not read")
    add("--world", type=count, default=1, metavar="N", help="number of processes (1)")
    add("--batch", type=count, default=batch, help=sequences)
    add("--seq", type=count, default=length, help=tokens)
    add("--adapter", default="", metavar="A", help=adapter)
    add("--checkpointing", action="store_true", help="with gradient checkpointing")
    add("--device-memory", type=gibibytes, metavar="GIB", help=device)
    add("--host-memory", type=gibibytes, metavar="GIB", help=host)
    add("--gpus-per-host", type=count, metavar="N", help=per_host)
    add("--speeds", type=Path, metavar="FILE", help="written by zero doctor --speeds")
    add("--device", metavar="NAMES", help=f"published speeds of: {', '.join(DEVICES)}")
    for name in GIVEN:
        unit = "TFLOP/s" if name == "compute" else "GB/s"
        add(f"--{name}-speed", type=above_zero, metavar=unit, help="of one process")


def _asked(options: Namespace) -> tuple[Question, dict[str, int]]:
    """The question, and bytes of memory of a process by place, where a limit is given."""
    given = {name: getattr(options, f"{name}_speed") for name in GIVEN}
    speeds = chosen(options.speeds, options.device, given)
    per_host = options.gpus_per_host or options.world
    if options.world % per_host:
        raise UsageError(f"--gpus-per-host {per_host} does not divide --world {options.world}")
    host = None if options.host_memory is None else options.host_memory / per_host
    memory = {"device": options.device_memory, "host": host}
    limits = {place: int(size * 2**30) for place, size in memory.items() if size is not None}
    model_folder(options.model)
    sizes = options.world, options.batch, options.seq
    return Question(*sizes, options.checkpointing, speeds, options.adapter, per_host), limits


def _inspect(arguments: list[str]) -> None:
    description, example = "Show what a training checkpoint contains.", "output/checkpoint-500"
    parser = Parser("inspect", description, example, json="it")
    parser.add_argument("checkpoint", help=CHECKPOINT)
    options = parser.parse_args(arguments)
    found = facts(options.checkpoint, progress=True)
    print(json.dumps(found, indent=2) if options.json else describe(found))


def _consolidate(arguments: list[str]) -> None:
    parser = Parser(
        "consolidate",
        "Turn a checkpoint into a model folder for from_pretrained, or into PEFT's adapters.",
        "output/checkpoint-500 model --dtype bf16",
        json="the written files",
    )
    dtypes = "dtype of the weights; default: the one in which they are trained"
    most = MAX_FILE_BYTES / 1e9
    parser.add_argument("checkpoint", help=CHECKPOINT)
    parser.add_argument("out", help="the folder to write to")
    parser.add_argument("--dtype", choices=DTYPES, help=dtypes)
    parser.add_argument("--max-file-size", type=above_zero, default=most, metavar="GB")
    base = "merge the adapter into the model in this folder, one weight at a time"
    parser.add_argument("--merge", metavar="BASE", help=base)
    options = parser.parse_args(arguments)
    how = DTYPES.get(options.dtype), int(options.max_file_size * 1e9), True
    if options.merge is None:
        written = consolidate(options.checkpoint, options.out, *how)
    else:
        written = merge(options.checkpoint, options.merge, options.out, *how)
    files = list(map(str, written))
    print(json.dumps({"files": files}) if options.json else "\n".join(files))


# Each gets its arguments, and returns the exit code or None.
COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "adopt": adopt,
    "consolidate": _consolidate,
    "convert": convert,
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
