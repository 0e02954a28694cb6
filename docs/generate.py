"""Generates documentation from the code: `python -m docs.generate`. A unit test fails if it must be
run again.

It writes the tables of keys in `configuration.md`; what `zero estimate` predicts in `recipes.md`
and `offload.md`, which takes two minutes; the list of the layers in `architecture.md`; what the
Trainer can do in `trainer-features.md`; the README's list of pages, which follows the `nav` of
`mkdocs.yml`; `index.md`, the start page of the site, from the README; the table of offload to
files in `results.md`; and the pictures `slices.svg` and `files.svg`."""

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docs import files, recipes, slices
from tests.hf import features
from zero.config.idle import OLD_NAMES, REMOVED_KEYS
from zero.config.keys import Section
from zero.config.load import section_of
from zero.config.optim import SCHEDULE_KEYS, SchedulerParams
from zero.config.settings import Config

FOLDER = Path(__file__).parent
_README = FOLDER.parent / "README.md"
# How the page writes what a key needs; it says once that keys need `enabled` or stage 3.
_NEEDS = {"batch_slices": "`batch_slices`", "device nvme": "`nvme`"}
BEGIN, END = "<!-- made by docs/generate.py -->\n", "<!-- end of what is made -->\n"


def _values(schema: dict[str, Any]) -> str:
    """Return which values a key takes, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_values, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{word}`" for word in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        items = schema.get("items") or schema["prefixItems"][0]
        kind = "names" if items["type"] == "string" else "numbers"
        return f"list of two {kind}" if schema.get("maxItems") == 2 else f"list of {kind}"
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


def _values_and_default(schema: dict[str, Any]) -> str:
    """Return which values a key takes, the default in bold."""
    values, default = _values(schema), _default(schema).replace('"', "")
    choices = values.split(", ")
    for chosen in default, default.strip("`"), f"`{default}`":
        if chosen in choices:
            return ", ".join(f"**{each}**" if each == chosen else each for each in choices)
    if default in ("", "``", "`[]`", "`{}`"):
        return values
    return f"{values}, {default if default == 'required' else f'**{default}**'}"


def _effect(section: type[Section], key: str) -> str:
    about = section.about(key)
    text, _ = section.describe(key)
    owners = [
        kind for kind, keys in SCHEDULE_KEYS.items() if section is SchedulerParams and key in keys
    ]
    notes = [
        f"For {', '.join(owners)}." if 0 < len(owners) < len(SCHEDULE_KEYS) else "",
        f"Needs {_NEEDS[about['needs']]}." if about.get("needs") in _NEEDS else "",
        f'`"auto"`: {_as_code(about["auto"])}.' if about.get("auto") else "",
    ]
    return _linked(" ".join(filter(None, [text, *notes])))


def _as_code(text: str) -> str:
    """Mark the names of arguments, which have an underscore."""
    return re.sub(r"\b\w+_\w+\b", r"`\g<0>`", text)


def _linked(text: str) -> str:
    """Make links of the names of other pages."""
    return re.sub(
        r"`?docs/([\w-]+)\.md`?",
        lambda page: f"[{page[1].replace('-', ' ').capitalize()}]({page[1]}.md)",
        text,
    )


# In a reason why a key has no effect: what to do instead.
_REMEDY = re.compile(r"\b(use|call|see|name|enable|log|cast) ")


def _folded(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a list of names and reasons: one item for all names that share a reason."""
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return [_item(f"{', '.join(names[reason])}: {_linked(reason)}") for reason in names]


def _item(text: str) -> str:
    indent = {"initial_indent": "- ", "subsequent_indent": "  "}
    return textwrap.fill(text, 100, break_on_hyphens=False, **indent)


def _table(*rows: str) -> str:
    columns = rows[0].count("|") - 1
    return "\n".join([rows[0], "|" + "---|" * columns, *rows[1:]]) + "\n"


def _sections(section: type[Section], path: str) -> Iterator[tuple[str, type[Section]]]:
    """Yield a section and all sections within it that act, each with its dotted name."""
    yield path, section
    for key in section.model_json_schema()["properties"]:
        nested = section_of(section, key)
        if nested is not None and not section.about(key).get("idle"):
            yield from _sections(nested, f"{path}.{key}".removeprefix("top level."))


def _acting_keys(section: type[Section]) -> dict[str, str]:
    """Return the row of each key that has an effect."""
    rows = {}
    for key, schema in section.model_json_schema()["properties"].items():
        if section_of(section, key) is None and not section.about(key).get("idle"):
            values = _values_and_default(schema).replace("|", "\\|")
            cells = f"`{key}`", values, _effect(section, key)
            rows[key] = f"| {' | '.join(cells)} |"
    return rows


def _idle_keys(path: str, section: type[Section]) -> str:
    """Return a list of the keys of a section without effect, with what to use instead."""
    keys = [
        (f"`{key}`" + (" (section)" if section_of(section, key) else ""), why)
        for key in section.model_fields
        if (why := section.about(key).get("idle"))
    ]
    helps = [pair for pair in keys if _REMEDY.search(pair[1])]
    others = ", ".join(name for name, why in keys if not _REMEDY.search(why))
    items = _folded(helps) + ([_item(others)] if others else [])
    return "\n".join([f"**{path}**", "", *items]) if items else ""


def _tables(wanted: list[str]) -> list[str]:
    """Return the tables of `configuration.md`.

    Args:
        wanted: for each table the name of a section and, after a colon, the keys that it shows.
            Without keys, it shows all keys of the section that no other table shows. Several
            sections with the same keys, separated by commas, share a table.
    """
    sections = dict(_sections(Config, "top level"))
    left = {name: _acting_keys(section) for name, section in sections.items()}
    lists = {
        "keys without effect": "\n\n".join(
            filter(None, (_idle_keys(path, section) for path, section in sections.items()))
        ),
        "old names": "\n".join(f"- `{old}`: `{new}`" for old, new in OLD_NAMES.items()),
        "keys that are errors": "\n".join(
            _folded((f"`{key}`", reason) for key, reason in REMOVED_KEYS.items())
        ),
    }
    named = [table.partition(": ")[::2] for table in wanted]
    shown = {
        (name, key): left[name].pop(key) for name, keys in named for key in keys.split(", ") if key
    }
    tables = []
    for name, keys in named:
        if name in lists:
            tables.append(lists.pop(name) + "\n")
            continue
        rows = [shown[name, key] for key in keys.split(", ") if key]
        if not rows:
            same, *others = (left.pop(each) for each in name.split(", "))
            if any(other != same for other in others):
                raise ValueError(f"{name} have different keys, so they cannot share a table")
            rows = [*same.values()]
        tables.append(_table("| key | values | what it does |", *rows))
    if missing := [*lists, *(f"{name}: {key}" for name, keys in left.items() for key in keys)]:
        raise ValueError(f"docs/configuration.md has no table for: {', '.join(missing)}")
    return tables


_TABLE = re.compile(r"(<!-- generate\.py: (.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def configuration(page: str) -> str:
    """Return the page of all keys with its current tables."""
    tables = iter(_tables([table[2] for table in _TABLE.finditer(page)]))
    return _TABLE.sub(lambda table: f"{table[1]}\n{next(tables)}\n", page)


def with_tables(page: str, tables: dict[str, str]) -> str:
    """Return the page with the current `tables`, which it names."""
    return _TABLE.sub(lambda table: f"{table[1]}\n{tables[table[2]]}\n", page)


def layers() -> list[list[str]]:
    """Return the layers of import-linter's contract, the one that imports all others first.

    Each layer has the names of its modules, without the leading `zero.`.
    """
    text = (FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8")
    _, _, rest = text.partition("\nlayers = [")
    return [
        [module.removeprefix("zero.") for module in layer.split(" | ")]
        for layer in re.findall(r'"(zero\..+?)"', rest.partition("]")[0])
    ]


def _path(module: str) -> str:
    """Return the folder or the file of a module, from `zero/` on."""
    path = module.replace(".", "/")
    return f"{path}/" if (FOLDER.parent / "zero" / path).is_dir() else f"{path}.py"


def list_of_layers() -> str:
    """Return the layers as a list: each may import those below it."""
    rows = (", ".join(f"`{_path(module)}`" for module in modules) for modules in layers())
    return "\n".join(f"{number}. {row}" for number, row in enumerate(rows, 1)) + "\n"


def architecture(page: str) -> str:
    """Return the page with the current list of the layers."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + list_of_layers() + "\n" + END + rest.split(END)[1]


# What a reader wants who opens a group of pages.
_GOALS = {
    "Start": "install zero, make a first run, or move from DeepSpeed or FSDP",
    "Train": "write your own loop, choose an optimizer, train adapters, translate, distil, save",
    "Scale": "fit a larger model, or use more GPUs and machines",
    "Fix": "find out why a run fails, hangs, is slow or does not converge",
    "Reference": "look up keys, limits, results and terms",
    "Inside": "read or change the code",
}


def sections() -> dict[str, list[str]]:
    """Return the pages of each group of the site, from the `nav` of `mkdocs.yml`."""
    text = (FOLDER.parent / "mkdocs.yml").read_text(encoding="utf-8")
    pages: dict[str, list[str]] = {}
    for line in text.partition("\nnav:\n")[2].splitlines():
        name = line.strip().removeprefix("- ")
        if name.endswith(":"):
            pages[name.removesuffix(":")] = []
        elif pages:
            pages[next(reversed(pages))].append(name)
    return {group: names for group, names in pages.items() if names}


def _title(page: str) -> str:
    return (FOLDER / page).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def list_of_pages() -> str:
    """Return the README's list of all pages."""
    lines = []
    for section, pages in sections().items():
        links = ", ".join(f"[{_title(page)}](docs/{page})" for page in pages)
        goal = _GOALS[section]
        text = f"- {goal[0].upper()}{goal[1:]}: {links}"
        lines += textwrap.wrap(
            text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines) + "\n"


def readme(page: str) -> str:
    """Return the README with the current list of pages."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + list_of_pages() + "\n" + END + rest.split(END)[1]


def trainer_features(page: str) -> str:
    """Return the page of the Trainer's features with the rows that are tested."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + features.table() + "\n" + END + rest.split(END)[1]


def start_page(page: str) -> str:
    """Return the start page of the site, made from the README.

    Links to files outside of `docs/`, which the site does not have, become plain text.
    """
    page = page.partition("\n<!-- not on the site -->")[0]
    page = page.replace(BEGIN, "").replace(END, "").replace("](docs/", "](")
    outside = r"\[([^]]+)\]\((?:\w+/README\.md|[A-Z]+(?:\.md)?)\)"
    return re.sub(r"\n{3,}", "\n\n", re.sub(outside, r"\1", page))


def main() -> None:
    """Write all generated parts."""
    pages = {
        FOLDER / "configuration.md": configuration,
        FOLDER / "architecture.md": architecture,
        FOLDER / "trainer-features.md": trainer_features,
        _README: readme,
    }
    for path, change in pages.items():
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    tables = recipes.tables() | {"files": files.table()}
    for name in ("recipes.md", "offload.md", "results.md"):
        page = (FOLDER / name).read_text(encoding="utf-8")
        (FOLDER / name).write_text(with_tables(page, tables), encoding="utf-8")
    start = start_page(_README.read_text(encoding="utf-8"))
    (FOLDER / "index.md").write_text(start, encoding="utf-8")
    for name, picture in (("slices", slices), ("files", files)):
        (FOLDER / f"{name}.svg").write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
