"""Generates documentation from the code: `python -m docs.generate`. A unit test fails if it must be
run again.

It writes `configuration.md`, with all keys of the configuration, and the picture of the folders in
`architecture.md`."""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from zero.config.idle import OLD_NAMES, REMOVED_KEYS
from zero.config.keys import Section
from zero.config.load import section_of
from zero.config.optim import SCHEDULE_KEYS, SchedulerParams
from zero.config.settings import Config

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- made by docs/generate.py -->\n", "<!-- end of what is made -->\n"

_HEAD = """\
# Configuration

This page is made by `python -m docs.generate`. Edit the descriptions in `zero/config/`, not this
page.

The configuration file is DeepSpeed's `ds_config.json`. `configs/ds_config_zero3.json` is a complete
example. `zero explain FILE` says what each key of your file does, what `"auto"` becomes, and which
keys have no effect. It also takes the YAML file of `accelerate config`.

- A misspelt or contradictory key is an error, before any model is built. The error names the key,
  its place and the nearest valid key.
- An unknown key that resembles no valid key is ignored at the top level. In every section so is one
  that begins with `_`, `//`, `#` or `comment`. One line names those that are ignored.
- A dotted key (`"zero_optimization.stage": 3`) means the nested key. If a file gives both with
  different values, that is an error. In a dict, the dotted key wins.
- Letter case does not matter in words such as `"SUM"`.
- `"auto"` means: the value that transformers or accelerate fill in. The tables name their argument.
  For other keys `"auto"` is an error.
- At the start of a run, rank 0 prints the keys that are not at their defaults, and
  `gradient_clipping`: the given value, the effective value, where it came from and, if the key does
  not act, the reason. All keys are in `zero_config.txt` in the folder of `--output_dir`.
- If [Hjson](https://hjson.github.io) is installed, comments and missing quotes are accepted.
- An empty default means: not set.
"""


def _values(schema: dict[str, Any]) -> str:
    """Return which values a key takes, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_values, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{word}`" for word in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        items = schema.get("items") or schema["prefixItems"][0]
        kind = "names" if items["type"] == "string" else "numbers"
        return f"a list of two {kind}" if schema.get("maxItems") == 2 else f"a list of {kind}"
    names = {"boolean": "true, false", "null": ""}
    kind = names.get(schema.get("type"), schema.get("type"))
    bounds = {"exclusiveMinimum": "above", "minimum": "from", "maximum": "to"}
    known = [
        f"{word} {schema[bound]:g}"
        for bound, word in bounds.items()
        if abs(schema.get(bound, sys.maxsize)) < 1e18
    ]
    return " ".join([kind, *known])


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    if value is None:
        return "" if "default" in schema else "required"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            "no limit"
            if value == sys.maxsize
            else f"{value:,}"
            if isinstance(value, int)
            else f"{value:g}"
        )
    return f"`{json.dumps(value)}`"


def _effect(section: type[Section], key: str) -> str:
    about = section.about(key)
    text, _ = section.describe(key)
    owners = [
        kind for kind, keys in SCHEDULE_KEYS.items() if section is SchedulerParams and key in keys
    ]
    notes = [
        f"Of {', '.join(owners)}." if 0 < len(owners) < len(SCHEDULE_KEYS) else "",
        f"Acts with {about['needs']} only." if about.get("needs") else "",
        f"`auto`: {about['auto']}." if about.get("auto") else "",
    ]
    return " ".join(filter(None, [text, *notes]))


def _page(section: type[Section], path: str) -> Iterator[str]:
    inner = []
    acting = ["| key | values | default | what it does |", "|---|---|---|---|"]
    idle = ["| key without effect | why |", "|---|---|"]
    for key, schema in section.model_json_schema()["properties"].items():
        dotted = f"{path}.{key}".lstrip(".")
        nested = section_of(section, key)
        if why := section.about(key).get("idle"):
            name = f"`{key}`" if nested is None else f"`{key}` (section)"
            idle.append(f"| {name} | {why} |")
            continue
        if nested is not None:
            inner.append((nested, dotted))
            continue
        values = _values(schema).replace("|", "\\|")
        cells = f"`{key}`", values, _default(schema), _effect(section, key)
        acting.append(f"| {' | '.join(cells)} |")
    yield f"## {f'`{path}`' if path else 'Top level'}\n"
    if path and section.__doc__:
        yield inspect.cleandoc(section.__doc__).partition("Attributes:")[0].strip() + "\n"
    for table in (acting, idle):
        if len(table) > 2:
            yield "\n".join(table) + "\n"
    for nested, name in inner:
        yield from _page(nested, name)


def reference() -> str:
    """Return the page of all keys as Markdown."""
    old = [f"| `{old}` | `{new}` |" for old, new in OLD_NAMES.items()]
    removed = [f"| `{key}` | {reason} |" for key, reason in REMOVED_KEYS.items()]
    tables = ["## Old names\n", "\n".join(["| old name | now |", "|---|---|", *old]) + "\n"]
    tables += ["## Keys that are errors\n", "\n".join(["| key | why |", "|---|---|", *removed])]
    return "\n".join([_HEAD, *_page(Config, ""), *tables]) + "\n"


def layers() -> list[str]:
    """Return the names in the contract of import-linter, the one that imports all others first."""
    text = (FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8")
    _, _, rest = text.partition("\nlayers = [")
    return re.findall(r'"zero\.(\w+)"', rest.partition("]")[0])


def picture() -> str:
    """Return the picture of the layers: each may import those below it."""
    boxes = []
    for name in layers():
        folder = (FOLDER.parent / "zero" / name).is_dir()
        boxes.append(f'    {name}["{name}{"/" if folder else ".py"}"]')
    arrows = [f"    {upper} --> {lower}" for upper, lower in pairwise(layers())]
    return "\n".join(["```mermaid", "flowchart TB", *boxes, *arrows, "```"]) + "\n"


def architecture(page: str) -> str:
    """Return the page with the current picture of the folders."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + picture() + "\n" + END + rest.split(END)[1]


def main() -> None:
    """Write both pages."""
    (FOLDER / "configuration.md").write_text(reference(), encoding="utf-8")
    path = FOLDER / "architecture.md"
    path.write_text(architecture(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
