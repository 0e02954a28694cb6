"""`zero explain`: what each key of a configuration file does, in sentences, and what to change for
speed or memory.

The sentences about keys come from their declarations. Nothing is built and nothing is measured.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable
from functools import reduce
from importlib.util import find_spec
from typing import Any, NamedTuple

from zero.config.keys import BATCH_KEYS, Section
from zero.config.loading import load_config
from zero.config.reading import section_of
from zero.config.report import rows_given
from zero.config.settings import Config

WIDTH = 100


class Explained(NamedTuple):
    """One key that the file gives: its value there, and what becomes of it in sentences."""

    key: str
    value: str
    group: str
    text: str


ACTING, FILLED_IN, IDLE = (
    "Keys that act",
    "Keys that the Trainer or accelerate fills in",
    "Keys without effect",
)


def explain(source: str) -> str:
    """The explanation of a configuration as text; ValueError as `load_config` raises it."""
    config = load_config(source, allow_auto=True)
    keys, lines = _explained(config), [f"{source}: {_summary(config)}"]
    for group in (ACTING, FILLED_IN, IDLE):
        members = [entry for entry in keys if entry.group == group]
        lines += ["", f"{group}:"] if members else []
        for entry in members:
            lines += [f"  {entry.key} = {entry.value}", *_wrapped(entry.text, "      ")]
    if config.ignored:
        lines += ["", f"Unknown keys, ignored: {', '.join(config.ignored)}"]
    for goal, advice in _advice(config).items():
        lines += ["", f"You could change, {goal}:"]
        for text in advice:
            lines += _wrapped(text, "    ", first="  - ")
    return "\n".join([*lines, "", "All other keys are at their defaults."])


def explain_as_json(source: str) -> str:
    """The same as a JSON object: "summary", "keys" (a list), "unknown" (names) and "advice" (texts
    by goal).
    """
    config = load_config(source, allow_auto=True)
    keys = [entry._asdict() for entry in _explained(config)]
    parts = {
        "summary": _summary(config),
        "keys": keys,
        "unknown": config.ignored,
        "advice": _advice(config),
    }
    return json.dumps(parts, indent=2)


def _wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent
    )


def _explained(config: Config) -> list[Explained]:
    found = []
    for row in rows_given(config):
        section = row.key.partition(".")[0]
        if f"{section}.enabled" in config.auto:
            text = f"{_effect(config, row.key)} Acts if {section}.enabled becomes true."
            found.append(Explained(row.key, _plain(row.given), ACTING, text))
        elif row.effect.startswith("none: "):
            text = f"No effect: {row.effect.removeprefix('none: ')}."
            found.append(Explained(row.key, _plain(row.given), IDLE, text))
        else:
            found.append(Explained(row.key, _plain(row.given), ACTING, _effect(config, row.key)))
    for key in sorted(config.auto):
        section, name = _declaration(key)
        becomes = f"Becomes: {_filled_in(section.about(name)['auto'])}."
        found.append(Explained(key, '"auto"', FILLED_IN, f"{_description(key)} {becomes}".strip()))
    return found


def _plain(given: str) -> str:
    """A number that JSON has as 1e9 without its `.0`."""
    return given.removesuffix(".0")


# What the Trainer has for arguments that are not given.
TRAINER = {
    **{
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
    },
    **{
        "max_grad_norm": 1.0,
        "warmup_steps": 0,
        "max_steps": -1,
        "num_train_epochs": 3.0,
        "fp16": False,
        "bf16": False,
    },
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}


def _filled_in(auto: str) -> str:
    """What the declaration says of "auto", with the Trainer's arguments as options and their
    defaults.
    """
    arguments = [word for word in re.findall(r"\w+", auto) if word in TRAINER]
    text = re.sub(r"\w+", lambda word: f"--{word[0]}" if word[0] in TRAINER else word[0], auto)
    if not arguments:
        return text
    defaults = ", ".join(json.dumps(TRAINER[each]) for each in arguments)
    return f"{text} of the Trainer (default{'s' * (len(arguments) > 1)} {defaults})"


# The packages that keys need.
PACKAGES = {"tensorboard.enabled": "tensorboard", "wandb.enabled": "wandb"}


def _effect(config: Config, key: str) -> str:
    """What a key does with the value that it has here."""
    section, name = _declaration(key)
    value, about = reduce(getattr, key.split("."), config), section.about(name)
    says = about.get("says") or {}
    text = says[value] if says and value in says else says.get("other", "")
    if text:
        text = text.format(f"{value:,.12g}" if isinstance(value, int | float) else value)
    else:
        text = f"Off. If true: {_description(key)}" if value is False else _description(key)
    if value and key in PACKAGES and find_spec(package := PACKAGES[key]) is None:
        more = f"The package {package} is not installed here: pip install {package}."
    else:
        more = _processes(config) if key == "train_batch_size" else _size(value, about.get("unit"))
    return f"{text} {more}".strip()


def _size(value: Any, unit: str | None) -> str:
    """The value in units for people."""
    if unit == "power of 2":
        return f"That is {2**value:,}."
    if not unit or not 0 < value < 1 << 50:
        return ""
    if unit == "bytes":
        return f"That is {_amount(value)}."
    of_parameters = f"{_amount(value * 2)} in 16 bits, {_amount(value * 4)} in fp32"
    return f"That is {value:,} elements: {of_parameters}."


def _amount(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} GiB"


def _processes(config: Config) -> str:
    """For how many processes the three batch sizes are made, if they are given."""
    total, *factors = (getattr(config, key) for key in BATCH_KEYS)
    if None in factors:
        return "Other batch sizes follow from it and the number of processes."
    processes = (
        total
        // math.prod(factors)
        * config.sequence_parallel_size
        * config.tensor_parallel.autotp_size
    )
    return (
        f"With the micro-batch and the accumulation of this file that takes {processes} "
        "process(es)."
    )


def _declaration(key: str) -> tuple[type[Section], str]:
    """The section that declares a dotted key, and the key's own name."""
    section: type[Section] = Config
    *path, name = key.split(".")
    for part in path:
        section = section_of(section, part)
    return section, name


def _description(key: str) -> str:
    """What the declaration of a key says, on one line."""
    section, name = _declaration(key)
    return " ".join((section.model_fields[name].description or "").split())


_SHARDED = {
    0: "nothing is sharded (stage 0)",
    1: "the optimizer state is sharded (stage 1)",
    2: "optimizer state and gradients are sharded (stage 2)",
    3: "optimizer state, gradients and parameters are sharded (stage 3)",
}


def _summary(config: Config) -> str:
    zero = config.zero_optimization
    parts = [
        "the stage is filled in"
        if "zero_optimization.stage" in config.auto
        else _SHARDED[zero.stage]
    ]
    if zero.mics_shard_size > 0:
        parts.append(f"over groups of {zero.mics_shard_size} processes (mics_shard_size)")
    if zero.stage == 3 and zero.zero_hpz_partition_size > 1:
        parts.append(
            f"a second shard of the weights over {zero.zero_hpz_partition_size} processes (hpZ)"
        )
    if zero.offloads_optimizer:
        parts.append(f"the optimizer state is offloaded to {zero.offload_optimizer.device}")
    if zero.offloads_params:
        parts.append(f"parameters are offloaded to {zero.offload_param.device}")
    chosen = [name for name in ("fp16", "bf16") if getattr(config, name).enabled]
    waiting = [name for name in ("fp16", "bf16") if f"{name}.enabled" in config.auto]
    if chosen or waiting:
        parts.append(
            f"{chosen[0]} compute"
            if chosen
            else f"{' or '.join(waiting)} if the Trainer is told so"
        )
    else:
        parts.append("fp32 compute")
    return ", ".join(parts)


class Rule(NamedTuple):
    """A change that helps a goal where `applies`."""

    goal: str
    applies: Callable[[Config], bool]
    text: str


def _zero(**wanted: Any) -> Callable[[Config], bool]:
    return lambda config: all(
        getattr(config.zero_optimization, key) == value for key, value in wanted.items()
    )


def _offloads_to(device: str) -> Callable[[Config], bool]:
    def check(config: Config) -> bool:
        zero = config.zero_optimization
        optimizer = zero.offloads_optimizer and zero.offload_optimizer.device == device
        return optimizer or (zero.offloads_params and zero.offload_param.device == device)

    return check


def _pins_nothing(config: Config) -> bool:
    zero = config.zero_optimization
    sections = [zero.offload_optimizer] if zero.offloads_optimizer else []
    sections += [zero.offload_param] if zero.offloads_params else []
    return any(not section.pin_memory for section in sections)


def _unpipelined(config: Config) -> bool:
    section = config.zero_optimization.offload_optimizer
    return (
        section is not None
        and section.device == "nvme"
        and not (section.pipeline_read and section.pipeline_write)
    )


MEMORY, SPEED, SAFETY = "for less memory", "for more speed", "for fewer surprises"
RULES = (
    Rule(
        MEMORY,
        lambda config: config.zero_optimization.stage < 2,
        "zero_optimization.stage 2 also shards gradients, and 3 parameters. Over N processes each "
        "then holds 1/N.",
    ),
    Rule(
        MEMORY,
        lambda config: config.zero_optimization.stage == 2,
        "zero_optimization.stage 3 also shards parameters: 1/N of 2 bytes each in 16 bits, for one "
        "more all-gather.",
    ),
    Rule(
        MEMORY,
        lambda config: (
            config.zero_optimization.stage > 0 and not config.zero_optimization.offloads_optimizer
        ),
        'zero_optimization.offload_optimizer {"device": "cpu"} moves gradients, masters and '
        "optimizer state off the "
        "device: with Adam in 16 bits 16 bytes a parameter, over the number of processes.",
    ),
    Rule(
        MEMORY,
        lambda config: (
            config.zero_optimization.stage == 3 and not config.zero_optimization.offloads_params
        ),
        'zero_optimization.offload_param {"device": "cpu"} leaves only the groups in use on the '
        "device.",
    ),
    Rule(
        MEMORY,
        lambda config: (
            config.compute_dtype.itemsize == 4
            and not {"fp16.enabled", "bf16.enabled"} & config.auto
        ),
        "bf16 (with --bf16) halves parameters and activations.",
    ),
    Rule(
        SPEED,
        _pins_nothing,
        "pin_memory true in the offload sections lets copies run beside the computation.",
    ),
    Rule(
        SPEED,
        _unpipelined,
        "pipeline_read and pipeline_write read and write files while tiles are updated.",
    ),
    Rule(
        SPEED,
        _offloads_to("nvme"),
        'device "cpu" instead of "nvme", if host memory suffices, is many times faster.',
    ),
    Rule(
        SPEED,
        _zero(stage=3, stage3_prefetch_bucket_size=0),
        "stage3_prefetch_bucket_size above 0 gathers ahead.",
    ),
    Rule(
        SPEED,
        _zero(stage=3, stage3_max_reuse_distance=0),
        "stage3_max_reuse_distance above 0 keeps groups that are needed again soon.",
    ),
    Rule(
        SPEED,
        _zero(stage=3, overlap_comm=False),
        "overlap_comm true reduces gradients while backward goes on.",
    ),
    Rule(
        SPEED,
        lambda config: config.wall_clock_breakdown,
        "wall_clock_breakdown false: the device need not be waited for in each phase.",
    ),
    Rule(
        SAFETY,
        lambda config: config.fp16.enabled,
        "Models pre-trained in bf16, T5 among them, overflow in fp16. Use bf16 if the device has "
        "it.",
    ),
    Rule(
        SAFETY,
        _zero(stage=3, stage3_gather_16bit_weights_on_model_save=False),
        "stage3_gather_16bit_weights_on_model_save true: save_model then writes whole weights for "
        "from_pretrained.",
    ),
    Rule(
        SAFETY,
        lambda config: (
            config.gradient_clipping == 0 and "gradient_clipping" in config.model_fields_set
        ),
        "gradient_clipping 1.0 bounds the step after a bad batch.",
    ),
)


def _advice(config: Config) -> dict[str, list[str]]:
    """The texts of the rules that apply, by goal.

    A stage that is still to be filled in gives none.
    """
    if "zero_optimization.stage" in config.auto:
        return {}
    found: dict[str, list[str]] = {}
    for rule in RULES:
        if rule.applies(config):
            found.setdefault(rule.goal, []).append(rule.text)
    return found
