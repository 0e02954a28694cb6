"""The commands `zero estimate` and `zero plan`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zero.config import Config, load_config
from zero.errors import UsageError
from zero.tools.arguments import (
    Parser,
    above_zero,
    count,
    gibibytes,
    output_file,
    working,
)
from zero.tools.estimate.question import PLAIN, Question, model_folder, with_batch
from zero.tools.estimate.speeds import DEVICES, GIVEN, chosen
from zero.tools.explain import load

if TYPE_CHECKING:
    from zero.tools.estimate.remedies import Search

# Where stderr is no terminal, a line about what is tried is printed after so many seconds.
_SECONDS = 5.0


def estimate(arguments: list[str]) -> None:
    """Run `zero estimate ARGUMENTS`."""
    parser = Parser(
        "estimate",
        "Predict how much memory each process will need, how many bytes it moves over each link in "
        "a step, and how long a step takes. No GPU is needed.",
        "models/t5-3b --ds-config ds.json --world 8 --batch 4 --seq 512 --device-memory 24G",
        json="the estimate",
    )
    config = "the file ds_config.json, or the YAML of accelerate"
    parser.add_argument("--ds-config", required=True, help=config)
    options = _parse(parser, arguments, 0, 0)
    if options.batch and not options.seq:
        parser.error("--batch needs --seq, the tokens of a sequence")
    with _searching(options, load(options.ds_config), options.ds_config) as search:
        from zero.tools.estimate.report import report

        text = report(options.model, search, options.json)
    print(text)


def plan(arguments: list[str]) -> None:
    """Run `zero plan ARGUMENTS`."""
    parser = Parser(
        "plan",
        "Write the fastest configuration with which training fits, and say why.",
        "models/llama-8b --device-memory 24G --host-memory 64G",
        json="the configuration",
    )
    out = "the file to write; default: ds_config.json, if there is none yet"
    parser.add_argument("--out", type=output_file, help=out)
    options = _parse(parser, arguments, 1, 2048)
    if options.out is None and (written := output_file("ds_config.json")).exists():
        raise UsageError(f"plan: {written} is there already: name the file to write with --out")
    if options.device_memory is None:
        parser.error("name the --device-memory, such as 24G")
    with _searching(options, load_config(PLAIN), "the plan") as search:
        from zero.tools.estimate.report import plan

        text = plan(options.model, search, options.out or Path("ds_config.json"), options.json)
    print(text)


@contextmanager
def _searching(options: Namespace, config: Config, source: str) -> Iterator[Search]:
    """Context with a search from this configuration, which is that of the file `source`. It shows
    what is tried.
    """
    per_host = options.gpus_per_host or options.world
    if options.world % per_host:
        raise UsageError(f"--gpus-per-host {per_host} does not divide --world {options.world}")
    speeds = {name: getattr(options, f"{name}_speed") for name in GIVEN}
    question = Question(
        options.world,
        options.batch,
        options.seq,
        options.checkpointing,
        chosen(options.speeds, options.device, speeds),
        per_host,
    )
    model_folder(options.model)
    config, question = with_batch(config, source, question)
    given = {"device": options.device_memory, "host": (options.host_memory or 0) / per_host}
    limits = {place: int(amount * 2**30) for place, amount in given.items() if amount}
    with working("following steps on fake tensors", _SECONDS) as show:
        from zero.tools.estimate.model import build, fill_in, read_config
        from zero.tools.estimate.remedies import Search

        shape = read_config(options.model)
        config = fill_in(config, shape)
        model = build(shape, config.compute_dtype, options.adapter)
        yield Search(model, config, question, limits, show)


def _parse(parser: Parser, arguments: list[str], batch: int, length: int) -> Namespace:
    """Parse the options that say what to estimate. `batch` (sequences per micro-batch) and `length`
    (tokens per sequence) are the defaults; 0: take them from the file, or leave out activations.
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
    return parser.parse_args(arguments)
