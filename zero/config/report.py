"""The table at the start of a run: each key's given and effective value, where it came from, and
whether it acts.

It knows the sections only through what their keys declare.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero.config.keys import IdleSection, Section
from zero.config.optim import SCHEDULE_KEYS, optimizer_defaults
from zero.config.reading import read, rename_deprecated, walk
from zero.config.settings import Config

logger = logging.getLogger("zero")

FILE = "zero_config.txt"


class Row(NamedTuple):
    key: str
    given: str
    effective: str
    source: str
    effect: str
    at_default: bool = False


_HEADER = Row("key", "given", "effective", "from", "effect")


def option(*names: str) -> str | None:
    """The value of the first of these options on this process's command line."""
    for position, argument in enumerate(sys.argv):
        name, equals, value = argument.partition("=")
        if name in names:
            return (
                value
                if equals
                else (sys.argv[position + 1] if position + 1 < len(sys.argv) else None)
            )
    return None


def _original(config: Config) -> dict:
    """Return the configuration as it was before "auto" was filled in, if the command line names its
    file.
    """
    source = option("--deepspeed", "--deepspeed_config")
    try:
        original = read(source)[1] if source else {}
    except (ValueError, OSError):
        original = {}
    return rename_deprecated(
        original if original and _became(original, config.raw) else config.raw
    )[0]


def _became(original: Any, filled: Any) -> bool:
    """Whether `filled` is `original` with "auto" filled in.

    Keys that a trainer removed do not count.
    """
    if isinstance(original, dict) and isinstance(filled, dict):
        # accelerate overwrites that key, whatever the file says.
        kept = {
            key: value
            for key, value in original.items()
            if key in filled and key != "steps_per_print"
        }
        return all(_became(value, filled[key]) for key, value in kept.items())
    return original in ("auto", filled)


def _show(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True)
    return "-" if value is None else json.dumps(value, default=str)


def _rows(
    section: Section, prefix: str, original: dict, inherited: str | None = None
) -> Iterator[Row]:
    for name, field in type(section).model_fields.items():
        key, value, given = prefix + name, getattr(section, name), name in section.model_fields_set
        reason = inherited or section.why_idle(name)
        if isinstance(value, Section):
            yield from _rows(value, f"{key}.", original, reason)
            continue
        if isinstance(section, IdleSection) and not given:
            continue
        holder, last = walk(original, key)
        written = holder.get(last, value if given else None)
        filled = given and written == "auto"
        source = (
            f"auto: {section.about(name).get('auto')}"
            if filled
            else "configuration"
            if given
            else "default"
        )
        effect = f"none: {reason}" if reason else "used"
        at_default = not given or value == field.get_default(call_default_factory=True)
        yield Row(key, _show(written), _show(value), source, effect, at_default)


def table(config: Config) -> list[Row]:
    """Return a row for each key, without settings that the chosen optimizer or schedule does not
    have.
    """
    settings: dict[str, dict] = {}
    if config.optimizer is not None:
        defaults = optimizer_defaults(config.optimizer.type, config.optimizer.params.torch_adam)
        settings["optimizer.params."] = {key: _show(default) for key, default in defaults.items()}
    if config.scheduler is not None:
        settings["scheduler.params."] = dict.fromkeys(SCHEDULE_KEYS[config.scheduler.type], "-")
    rows = []
    for row in _rows(config, "", _original(config)):
        section = next((section for section in settings if row.key.startswith(section)), None)
        if section is not None:
            key = row.key.removeprefix(section)
            if key not in settings[section]:
                continue
            if row.effective == "-":
                row = row._replace(effective=settings[section][key])
        if "." in row.key and row.key in config.raw:
            row = row._replace(
                source=f"{row.source} (dotted key)", given=_show(config.raw[row.key])
            )
        rows.append(row)
    return rows


def rows_given(config: Config) -> list[Row]:
    """The rows of the keys that the configuration gives."""
    return [row for row in table(config) if row.source != "default"]


def report(config: Config, everything: bool = True) -> str:
    """Return the table as text.

    `everything`: all keys, else those that are not at their defaults.
    """
    rows = [_HEADER, *(row for row in table(config) if everything or not row.at_default)]
    widths = [min(max(len(row[i]) for row in rows), 60) for i in range(4)]
    lines = [
        "  ".join([*(row[i][:60].ljust(widths[i]) for i in range(4)), row.effect]) for row in rows
    ]
    if config.ignored:
        lines.append(f"unknown keys, ignored: {', '.join(config.ignored)}")
    return "\n".join(lines)


_reported: set[str] = set()


def announce(config: Config, facts: str = "") -> None:
    """Print the keys that are not at their defaults, once for each configuration. Write all to
    `--output_dir`.

    `facts`: lines for the end of the table.
    """
    text, folder = report(config) + facts, option("--output_dir")
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
