"""The table at the start of a run: each key's given and effective value, where it came from, and
whether it acts.

It knows the sections only through what their keys declare. The command line of the script names
the file in which "auto" was not filled in yet (`--deepspeed`), and the folder for the whole table
(`--output_dir`).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero.config.idle import IdleSection
from zero.config.keys import Section
from zero.config.load import find, read, rename_old, section_of
from zero.config.optim import SCHEDULE_KEYS, optimizer_defaults
from zero.config.settings import Config

logger = logging.getLogger("zero")

FILE = "zero_config.txt"


class Row(NamedTuple):
    """One key. `given` and `effective` are JSON, or "-" for no value."""

    key: str
    given: str
    effective: str
    source: str
    effect: str
    at_default: bool = False


_HEADER = Row("key", "given", "effective", "from", "effect")


def table(config: Config) -> list[Row]:
    """Return a row for each key, without settings that the chosen optimizer or schedule does not
    have.
    """
    defaults: dict[str, dict[str, Any]] = {}
    if config.optimizer is not None:
        torch_adam = config.optimizer.params.torch_adam
        defaults["optimizer.params"] = optimizer_defaults(config.optimizer.type, torch_adam)
    if config.scheduler is not None:
        defaults["scheduler.params"] = dict.fromkeys(SCHEDULE_KEYS[config.scheduler.type])
    written = _written(config)
    rows = []
    for row in _rows(config, config, "", written):
        section, _, name = row.key.rpartition(".")
        if section in defaults:
            if name not in defaults[section]:
                continue
            if row.effective == "-":
                row = row._replace(effective=_show(defaults[section][name]))
        if section and row.key in config.origin.raw:
            given = _show(config.origin.raw[row.key])
            row = row._replace(source=f"{row.source} (dotted key)", given=given)
        rows.append(row)
    return rows


def _rows(
    config: Config, section: Section, prefix: str, written: dict, inherited: str | None = None
) -> Iterator[Row]:
    """The rows of a section. `inherited`: why none of its keys acts."""
    for name, field in type(section).model_fields.items():
        key, value, about = prefix + name, getattr(section, name), section.about(name)
        reason = about.get("idle") or inherited or section.why_idle(name)
        if isinstance(value, Section):
            yield from _rows(config, value, f"{key}.", written, reason)
            continue
        given = key in config.origin.given
        whole = isinstance(section, IdleSection) or section_of(type(section), name) is not None
        if "idle" in about and whole and not given:
            continue  # of the sections without effect only what the file gives
        default = field.get_default(call_default_factory=True) if given else value
        holder, last = find(written, key)
        text = _show(holder.get(last, value if given else None))
        source = "configuration" if given else "default"
        if given and text == '"auto"':
            source = f"auto: {about.get('auto')}"
        effect = f"none: {reason}" if reason else "used"
        yield Row(key, text, _show(value), source, effect, at_default=value == default)


def _written(config: Config) -> dict:
    """Return the configuration as it was before "auto" was filled in, if the command line names its
    file.
    """
    source = _option(config, "--deepspeed", "--deepspeed_config")
    try:
        original = read(source)[1] if source else {}
    except (ValueError, OSError):
        original = {}
    raw = config.origin.raw
    return rename_old(original if original and _became(original, raw) else raw)[0]


def _became(original: Any, filled: Any) -> bool:
    """Whether `filled` is `original` with "auto" filled in.

    Keys that a trainer removed do not count.
    """
    if not isinstance(original, dict) or not isinstance(filled, dict):
        return original in ("auto", filled)
    # accelerate overwrites steps_per_print, whatever the file says.
    kept = original.keys() & filled.keys() - {"steps_per_print"}
    return all(_became(original[key], filled[key]) for key in kept)


def _option(config: Config, *names: str) -> str | None:
    """The value of the first of these options on the script's command line."""
    words = list(config.origin.command_line)
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(words[position + 1 :]), None)
    return None


def _show(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return "-" if value is None else json.dumps(value, default=str)


def report(config: Config, everything: bool = True) -> str:
    """Return the table as text.

    `everything`: all keys, else those that are not at their defaults.
    """
    rows = [_HEADER, *(row for row in table(config) if everything or not row.at_default)]
    columns = [[str(cell)[:60] for cell in column] for column in list(zip(*rows, strict=True))[:4]]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row, *cells in zip(rows, *columns, strict=True):
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*padded, row.effect]))
    if config.origin.ignored:
        lines.append(f"unknown keys, ignored: {', '.join(config.origin.ignored)}")
    return "\n".join(lines)


_reported: set[str] = set()


def announce(config: Config, facts: str = "") -> None:
    """Print the keys that are not at their defaults, once for each configuration. Write all to
    `--output_dir`.

    `facts`: lines for the end of the table.
    """
    text, folder = report(config) + facts, _option(config, "--output_dir")
    if text in _reported:
        return
    _reported.add(text)
    print(report(config, everything=False) + facts, file=sys.stderr)
    if not folder:
        print(
            "all other keys are at their defaults; with --output_dir a file there lists them",
            file=sys.stderr,
        )
        return
    path = Path(folder) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        print(f"all other keys are at their defaults; {path} lists them", file=sys.stderr)
    except OSError as error:
        logger.warning("the table of the configuration was not written: %s", error)
