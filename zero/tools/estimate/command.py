"""The commands `zero estimate` and `zero plan`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zero.config import Config, load_config
from zero.errors import UsageError
from zero.tools.arguments import Parser, output_file, working
from zero.tools.estimate.question import PLAIN, Question, model_folder, with_batch
from zero.tools.estimate.speeds import GIVEN, chosen
from zero.tools.explain import load

if TYPE_CHECKING:
    from zero.tools.estimate.remedies import Search

# Where stderr is no terminal, a line about what is tried is printed after so many seconds.
_SECONDS = 5.0


def estimate(arguments: list[str]) -> None:
    """Run `zero estimate ARGUMENTS`."""
    parser = Parser("estimate")
    options = parser.parse_args(arguments)
    if options.batch and not options.seq:
        parser.error("--batch needs --seq, the tokens of a sequence")
    with _searching(options, load(options.ds_config), options.ds_config) as search:
        from zero.tools.estimate.report import report

        text = report(options.model, search, options.json)
    print(text)


def plan(arguments: list[str]) -> None:
    """Run `zero plan ARGUMENTS`."""
    parser = Parser("plan")
    options = parser.parse_args(arguments)
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
