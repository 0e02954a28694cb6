"""What a configuration did: every key with its given and its effective value, where that came from, and its effect."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zero.config.keys import Section
from zero.config.reading import read, walk
from zero.config.settings import Config

# The argument of transformers' TrainingArguments that replaces "auto" for a key, where it has another name.
_TRAINER_ARGUMENTS = {
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x ranks",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps or num_train_epochs",
    "zero_optimization.reduce_bucket_size": "the model's hidden size",
    "zero_optimization.stage3_prefetch_bucket_size": "the model's hidden size",
    "zero_optimization.stage3_param_persistence_threshold": "the model's hidden size",
}
logger = logging.getLogger("zero")

FILE = "zero_config.txt"
_HEADER = ("key", "given", "effective", "from", "effect")


def option(*names: str) -> str | None:
    """The value of the first of these options on this process's command line."""
    for position, argument in enumerate(sys.argv):
        name, equals, value = argument.partition("=")
        if name in names:
            return value if equals else (sys.argv[position + 1] if position + 1 < len(sys.argv) else None)
    return None


def _original(config: Config) -> dict:
    """The configuration as the command line names it, before anybody filled in "auto", if it is this one."""
    source = option("--deepspeed", "--deepspeed_config")
    try:
        original = read(source)[1] if source else {}
    except (ValueError, OSError):
        return config.raw
    return original if original and _same_but_for_auto(original, config.raw) else config.raw


def _same_but_for_auto(original: Any, filled: Any) -> bool:
    if isinstance(original, dict) and isinstance(filled, dict):
        return all(key in filled and _same_but_for_auto(value, filled[key]) for key, value in original.items())
    return original in ("auto", filled)


def _show(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True)
    return "-" if value is None else json.dumps(value, default=str)


def _rows(section: Section, prefix: str, original: dict, inherited: str | None = None) -> Iterator[tuple[str, ...]]:
    for name in type(section).model_fields:
        key, value = prefix + name, getattr(section, name)
        reason = inherited or section.idle(name)
        if isinstance(value, Section):
            yield from _rows(value, f"{key}.", original, reason)
            continue
        holder, last = walk(original, key)
        given = holder.get(last)
        if given == "auto":
            source = f"auto: {_TRAINER_ARGUMENTS.get(key, last)}"
        elif name in section.model_fields_set:
            source = "configuration"
        else:
            source = "default"
        shown = given if given is not None else (value if source == "configuration" else None)
        yield key, _show(shown), _show(value), source, f"none: {reason}" if reason else "used"


def report(config: Config, everything: bool = True) -> str:
    """A table for people with a line for each key of `config`; without `everything`, not for those that neither were
    given nor do anything."""
    rows = list(_rows(config, "", _original(config)))
    # Settings that the chosen optimizer or schedule does not have.
    rows = [row for row in rows if not (".params." in row[0] and row[2] == "-" and row[3] == "default")]
    if not everything:
        rows = [row for row in rows if row[3] != "default" or row[4] == "used"]
    rows = [_HEADER, *rows]
    widths = [min(max(len(row[i]) for row in rows), 60) for i in range(4)]
    return "\n".join(
        "  ".join([*(cell[:60].ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    )


_reported: set[str] = set()


def announce(config: Config) -> None:
    """Print the table once for each configuration, and write it whole to `FILE` in the folder `--output_dir` names."""
    text = report(config)
    if text in _reported:
        return
    _reported.add(text)
    print(report(config, everything=False), file=sys.stderr)
    if folder := option("--output_dir"):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / FILE).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning("the table of the configuration was not written: %s", error)
