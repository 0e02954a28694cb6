"""Prints the table at the start of a run: each key's given and effective value, where it came from,
and whether it has an effect.

It knows the sections only through the declarations of their keys. The folder for the whole table
comes from the script's command line (`--output_dir`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zero.config.idle import IdleSection
from zero.config.keys import Section
from zero.config.load import find, section_of
from zero.config.optim import SCHEDULE_KEYS, optimizer_defaults
from zero.config.settings import Config

logger = logging.getLogger("zero")

FILE = "zero_config.txt"


class Row(NamedTuple):
    """One key. `given` and `effective` are JSON, or "-" for no value. `effect` is "used", or "none:
    " and the reason."""

    key: str
    given: str
    effective: str
    source: str
    effect: str
    at_default: bool = False


_HEADER = Row("key", "given", "effective", "from", "")


# Gradients are clipped by default. Older DeepSpeeds did not do so.
_ALWAYS = ("gradient_clipping",)


def table(config: Config) -> list[Row]:
    """Return a row for each key, without settings that the chosen optimizer or schedule does not
    have.
    """
    return [row for _, row in rows(config)]


def rows(config: Config) -> Iterator[tuple[Section, Row]]:
    """Yield the rows of `table`, each with the section that declares the key."""
    defaults: dict[str, dict[str, Any]] = {}
    if config.optimizer is not None:
        torch_adam = config.optimizer.params.torch_adam
        defaults["optimizer.params"] = optimizer_defaults(config.optimizer.type, torch_adam)
    if config.scheduler is not None:
        defaults["scheduler.params"] = dict.fromkeys(SCHEDULE_KEYS[config.scheduler.type])
    for declared, row in _rows(config, config, ""):
        section, _, name = row.key.rpartition(".")
        if section in defaults:
            if name not in defaults[section] and row.key not in config.origin.auto:
                continue
            if row.effective == "-":
                row = row._replace(effective=_show(defaults[section].get(name)))
        if section and row.key in config.origin.raw:
            given = _show(config.origin.raw[row.key])
            row = row._replace(source=f"{row.source} (dotted key)", given=given)
        yield declared, row


def _rows(
    config: Config, section: Section, prefix: str, inherited: str | None = None
) -> Iterator[tuple[Section, Row]]:
    """The rows of a section. `inherited`: why none of its keys has an effect."""
    for name, field in type(section).model_fields.items():
        key, value, about = prefix + name, getattr(section, name), section.about(name)
        reason = about.get("idle") or inherited or section.why_idle(name)
        if isinstance(value, Section):
            yield from _rows(config, value, f"{key}.", reason)
            continue
        given = key in config.origin.given
        in_idle_section = isinstance(section, IdleSection) or section_of(type(section), name)
        if "idle" in about and in_idle_section and not given:
            continue  # of sections without effect, show only what the file gives
        default = field.get_default(call_default_factory=True) if given else value
        holder, last = find(config.origin.written, key)
        text = _show(holder.get(last, value if given else None))
        source = "configuration" if given else "default"
        effect = f"none: {reason}" if reason else "used"
        yield section, Row(key, text, _show(value), source, effect, at_default=value == default)


def _output_dir() -> str | None:
    """The value of `--output_dir` on the script's command line."""
    for position, word in enumerate(sys.argv):
        name, equals, value = word.partition("=")
        if name == "--output_dir":
            return value if equals else next(iter(sys.argv[position + 1 :]), None)
    return None


def _show(value: Any) -> str:
    return "-" if value is None else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if isinstance(value, Section) else str(value)


def report(config: Config, everything: bool = True) -> str:
    """Return the table as text. Only keys without effect have a note.

    `everything`: show all keys; otherwise, only those that differ from their defaults, and those
    in `_ALWAYS`.
    """
    shown = [_HEADER]
    for row in table(config):
        if everything or not row.at_default or row.key in _ALWAYS:
            shown.append(row)
    cells = [[str(cell)[:60] for cell in row[:4]] for row in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row, texts in zip(shown, cells, strict=True):
        padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
        effect = "" if row.effect == "used" else row.effect
        lines.append("  ".join([*padded, effect]).rstrip())
    if config.origin.ignored:
        lines.append(f"unknown keys, ignored: {', '.join(config.origin.ignored)}")
    return "\n".join(lines)


_reported: set[str] = set()


def announce(config: Config, facts: str = "") -> None:
    """Print the keys that differ from their defaults, once for each configuration. Write all keys
    to `--output_dir`.

    `facts`: lines for the end of the table.
    """
    # A recorded run (`zero verify`, `trace`, `memory`) leaves the folder of the user's run alone.
    folder = None if "ZERO_RECORDER" in os.environ else _output_dir()
    text = report(config) + facts
    if text in _reported:
        return
    _reported.add(text)
    shown = report(config, everything=False)
    print(f"zero is the engine of this run, with these settings:\n{shown}{facts}", file=sys.stderr)
    if not folder:
        print("all other keys are at their defaults", file=sys.stderr)
        return
    path = Path(folder) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        print(f"all other keys are at their defaults; {path} lists them", file=sys.stderr)
    except OSError as error:
        logger.warning("the table of the configuration was not written: %s", error)
