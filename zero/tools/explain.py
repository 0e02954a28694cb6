"""`zero explain` says in sentences what each key of a configuration file does.

The sentences come from the declarations of the keys. Nothing is built and nothing is measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from zero.config import sources
from zero.config.keys import Section
from zero.config.load import load_config
from zero.config.settings import Config
from zero.config.table import Row, rows
from zero.errors import UsageError, size
from zero.tools.arguments import Parser

ACTING = "Keys with an effect"
FILLED_IN = "Keys that the Trainer or accelerate fills in"
IDLE = "Keys without effect"


class Explained(NamedTuple):
    """One key that the file gives: its value there, and what becomes of it in sentences."""

    key: str
    value: str
    group: str
    text: str


def command(arguments: list[str]) -> None:
    """Run `zero explain ARGUMENTS`."""
    options = Parser("explain").parse_args(arguments)
    print(explain(options.config, options.json))


def explain(source: str, as_json: bool = False) -> str:
    """The explanation of a configuration as text, or as a JSON object: "keys" (a list) and
    "unknown" (names). Raises ValueError as `load_config` does.
    """
    config = load(source)
    keys = list(_explained(config))
    if as_json:
        listed = [entry._asdict() for entry in keys]
        return json.dumps({"keys": listed, "unknown": config.origin.ignored}, indent=2)
    lines = [f"{source}:", *map(_indented, _advice(config))]
    for group in (ACTING, FILLED_IN, IDLE):
        members = [entry for entry in keys if entry.group == group]
        if members:
            lines += ["", f"{group}:"]
        for entry in members:
            lines += [f"  {entry.key} = {entry.value}", _indented(entry.text, "      ")]
    if config.origin.ignored:
        lines += ["", _indented(f"Unknown keys, ignored: {', '.join(config.origin.ignored)}", "")]
    return "\n".join([*lines, "", "All other keys are at their defaults."])


def _indented(text: str, indent: str = "  ") -> str:
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent)


def _advice(config: Config) -> Iterator[str]:
    """Lines about what costs time, and about settings that an engine refuses."""
    zero, experts = config.zero_optimization, config.expert_parallel.size
    if experts > 1 and config.tensor_parallel.autotp_size == 1:
        from zero.parallel.experts import refuse_others  # here: torch takes seconds

        shards = zero.mics_shard_size, zero.zero_hpz_partition_size
        try:  # on as few processes as all of these sizes divide
            refuse_others(config, math.lcm(experts, *(max(1, size) for size in shards)))
        except UsageError as error:
            yield f"An engine refuses this: {error}."
    if zero.offloads_optimizer or zero.offloads_params:
        yield (
            "Offload makes each step slower, and is needed only if the GPUs are too small for the "
            "model. To find out: zero plan MODEL --device-memory 24G"
        )


def load(source: str) -> Config:
    """A DeepSpeed configuration, or the one that a file of `accelerate config` names or makes."""
    if not source.endswith((".yaml", ".yml")):
        return load_config(source, allow_auto=True)
    import yaml  # here: most configurations are JSON

    try:
        content = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"{source}: cannot read it as YAML: {why}") from error
    keys = content.get("deepspeed_config") if isinstance(content, dict) else None
    if not isinstance(keys, dict):
        raise UsageError(
            f"{source}: has no section deepspeed_config; `accelerate config` writes one if you "
            "choose DeepSpeed"
        )
    if "deepspeed_config_file" in keys:
        return load_config(keys["deepspeed_config_file"], allow_auto=True)
    from accelerate.utils import DeepSpeedPlugin  # here: it takes seconds

    known = {field.name for field in dataclasses.fields(DeepSpeedPlugin)}
    try:
        plugin = DeepSpeedPlugin(**{name: keys[name] for name in keys.keys() & known})
        if content.get("mixed_precision") in ("fp16", "bf16"):
            plugin.set_mixed_precision(content["mixed_precision"])
        return load_config(plugin.deepspeed_config, allow_auto=True)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{source}: deepspeed_config: {error}") from error


def _explained(config: Config) -> Iterator[Explained]:
    auto = config.origin.auto
    for section, row in rows(config):
        name = row.key.rpartition(".")[2]
        about = section.about(name)
        # Keys of a section whose switch is still "auto" may have an effect later.
        switch = f"{row.key.partition('.')[0]}.enabled"
        waits = switch in auto and "idle" not in about
        value = row.given.removesuffix(".0")  # JSON has 1e9 as a float
        if row.key in auto and "auto" not in about:
            text = f"{section.describe(name)[0]} Without a Trainer: {row.effective}, its default."
            yield Explained(row.key, '"auto"', ACTING, text)
        elif row.key in auto:
            text = f"{section.describe(name)[0]} Becomes: {_filled_in(about['auto'])}."
            yield Explained(row.key, '"auto"', FILLED_IN, text.strip())
        elif row.source == "default":
            continue
        elif row.effect == "used" or waits:
            text = _effect(config, section, name, row)
            text += f" Has an effect only if {switch} becomes true." if waits else ""
            yield Explained(row.key, value, ACTING, text)
        else:
            text = f"No effect: {row.effect.removeprefix('none: ')}."
            yield Explained(row.key, value, IDLE, text)


def _filled_in(auto: str) -> str:
    """What the declaration says of "auto", with the Trainer's arguments as options and their
    defaults.
    """
    defaults = sources.defaults("transformers.training_args", "TrainingArguments")
    arguments = [word for word in re.findall(r"\w+", auto) if word in defaults]
    if not arguments:
        return auto
    text = re.sub(r"\w+", lambda word: f"--{word[0]}" if word[0] in defaults else word[0], auto)
    values = ", ".join(json.dumps(defaults[argument]) for argument in arguments)
    return f"{text} of the Trainer (default{'s' * (len(arguments) > 1)} {values})"


# The packages that keys need.
PACKAGES = {"tensorboard.enabled": "tensorboard", "wandb.enabled": "wandb"}


def _effect(config: Config, section: Section, name: str, row: Row) -> str:
    """What a key with an effect does, with the value that it has here."""
    text, meanings = section.describe(name)
    effective, given = (cell.strip('"').removesuffix(".0") for cell in (row.effective, row.given))
    if effective in meanings or given in meanings:
        text = meanings.get(effective) or meanings[given]
    elif "N" in meanings:
        number = f"{json.loads(row.effective):,}" if effective.isdigit() else effective
        text = re.sub(r"\bN\b", number, meanings["N"])
    elif effective == "false":
        text = f"Off. If true: {text}"
    package = PACKAGES.get(row.key)
    if package and effective == "true" and find_spec(package) is None:
        text += f" The package {package} is not installed here: pip install {package}."
    if row.key == "train_batch_size":
        text += f" {_processes(config)}"
    if unit := section.about(name).get("unit"):
        text += _size(json.loads(row.effective), unit)
    return text


def _size(value: int, unit: str) -> str:
    """The value in units for people."""
    if unit == "power of 2":
        # Where fp16 is off, or still "auto", the power may be any number.
        return f" That is {2**value:,}." if value <= 127 else ""
    if not 0 < value < 1 << 50:
        return ""
    if unit == "bytes":
        return f" That is {size(value)}."
    of_parameters = f"{size(value * 2)} in 16 bits, {size(value * 4)} in fp32"
    return f" That is {value:,} elements: {of_parameters}."


def _processes(config: Config) -> str:
    """How many processes the three batch sizes are meant for, if all are given."""
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if config.train_batch_size is None or micro is None or steps is None:
        return "Other batch sizes follow from it and the number of processes."
    sharing = config.sequence_parallel_size * config.tensor_parallel.autotp_size
    processes = config.train_batch_size // (micro * steps) * sharing
    return f"With this file's micro-batch and accumulation, it needs {processes} process(es)."
