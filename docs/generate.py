"""Generates documentation from the code: `python -m docs.generate`. A unit test fails if it must be
run again.

It writes `configuration.md`, with all keys of the configuration, and the picture of the imports in
`architecture.md`."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero.config.keys import DEPRECATED_KEYS, REMOVED_KEYS, IdleSection, Section
from zero.config.optim import SCHEDULE_KEYS, SchedulerParams
from zero.config.reading import section_of
from zero.config.settings import Config

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- made by docs/generate.py -->\n", "<!-- end of what is made -->\n"

_HEAD = """\
# Configuration

This page is made by `python -m docs.generate`. Edit the descriptions in `zero/config/`, not this page.

The configuration file is DeepSpeed's `ds_config.json`. `configs/ds_config_zero3.json` is a complete example. `zero
explain FILE` says what each key of your file does, what `"auto"` becomes, and which keys have no effect. It also says
what to change for less memory or more speed.

- A misspelt or contradictory key is an error, before any model is built. The error names the key, its place and the
  nearest valid key.
- An unknown key that resembles no valid key (`_comment`) is ignored. One line names it.
- A dotted key (`"zero_optimization.stage": 3`) means the nested key. If a file gives both with different values, that
  is an error. In a dict, the dotted key wins.
- Letter case does not matter in words such as `"SUM"`.
- `"auto"` means: the value that transformers or accelerate fill in. The tables name their argument. For other keys
  `"auto"` is an error.
- At the start of a run, rank 0 prints the keys that are not at their defaults: the given value, the effective value,
  where it came from, and whether it acts. All keys are in `zero_config.txt` in the folder of `--output_dir`.
- If [Hjson](https://hjson.github.io) is installed, comments and missing quotes are accepted.
- An empty default means: not set.
"""


def _values(schema: dict[str, Any]) -> str:
    """Return which values a key takes, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_values, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{word}`" for word in schema.get("enum", [schema.get("const")]))
    names = {"boolean": "true, false", "null": "", "array": "a list of two numbers"}
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


def _effect(section: type[Section], key: str, schema: dict[str, Any]) -> str:
    about, text = section.about(key), schema.get("description", "")
    owners = [
        kind for kind, keys in SCHEDULE_KEYS.items() if section is SchedulerParams and key in keys
    ]
    notes = [
        f"Of {', '.join(owners)}." if 0 < len(owners) < len(SCHEDULE_KEYS) else "",
        f"Acts with {about['needs']} only." if about.get("needs") else "",
        f"`auto`: {about['auto']}." if about.get("auto") else "",
    ]
    return " ".join(filter(None, [text.replace("\n", " "), *notes]))


def _page(section: type[Section], path: str) -> Iterator[str]:
    properties, inner = section.model_json_schema()["properties"], []
    acting = ["| key | values | default | what it does |", "|---|---|---|---|"]
    idle = ["| key without effect | why |", "|---|---|"]
    for key, schema in properties.items():
        nested, reason = section_of(section, key), section.about(key).get("unused")
        if nested is not None and not issubclass(nested, IdleSection):
            inner.append((nested, f"{path}.{key}".lstrip(".")))
        elif reason:
            idle.append(f"| `{key}`{' (section)' if nested else ''} | {reason} |")
        else:
            values = _values(schema).replace("|", "\\|")
            acting.append(
                f"| `{key}` | {values} | {_default(schema)} | {_effect(section, key, schema)} |"
            )
    yield f"## {f'`{path}`' if path else 'Top level'}\n"
    if path and section.__doc__:
        yield "\n".join(line.strip() for line in section.__doc__.strip().splitlines()) + "\n"
    for table in (acting, idle):
        if len(table) > 2:
            yield "\n".join(table) + "\n"
    for nested, name in inner:
        yield from _page(nested, name)


def reference() -> str:
    """Return the page of all keys as Markdown."""
    old = [f"| `{old}` | `{new}` |" for old, (new, _) in DEPRECATED_KEYS.items()]
    removed = [f"| `{key}` | {reason} |" for key, reason in REMOVED_KEYS.items()]
    tables = ["## Old names\n", "\n".join(["| old name | now |", "|---|---|", *old]) + "\n"]
    tables += ["## Keys that are errors\n", "\n".join(["| key | why |", "|---|---|", *removed])]
    return "\n".join([_HEAD, *_page(Config, ""), *tables]) + "\n"


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            yield node
            yield from _nodes(node)


def imports_of_modules() -> dict[str, set[str]]:
    """Return for each box of the picture the boxes that it imports.

    A folder is one box. Any other file is one box.
    """
    root, box_of = FOLDER.parent, {}
    for path in sorted((root / "zero").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        box_of[name] = f"zero.{parts[1]}/" if len(parts) > 2 else name
    found: dict[str, set[str]] = {box: set() for box in box_of.values()}
    for name, box in box_of.items():
        path = root / name.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
                modules = [each if each in box_of else node.module for each in modules]
            found[box] |= {box_of[each] for each in modules if each in box_of} - {box}
    return found


def picture() -> str:
    """Return the picture: an arrow for each import, unless a longer path already shows it."""
    imports = imports_of_modules()

    def below(box: str, seen: set[str]) -> set[str]:
        for each in imports[box] - seen:
            seen.add(each)
            below(each, seen)
        return seen

    arrows = []
    for box, direct in sorted(imports.items()):
        implied = {far for each in direct for far in below(each, set())}
        label = box.removeprefix("zero.") or box
        arrows.append(f'    {_id(box)}["{label}"]')
        arrows += [f"    {_id(box)} --> {_id(each)}" for each in sorted(direct - implied)]
    return "\n".join(["```mermaid", "flowchart TB", *arrows, "```"]) + "\n"


def _id(box: str) -> str:
    return box.replace(".", "_").replace("/", "_folder")


def architecture(page: str) -> str:
    """Return the page with the current picture of the imports."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + picture() + "\n" + END + rest.split(END)[1]


def main() -> None:
    """Write both pages."""
    (FOLDER / "configuration.md").write_text(reference(), encoding="utf-8")
    path = FOLDER / "architecture.md"
    path.write_text(architecture(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
