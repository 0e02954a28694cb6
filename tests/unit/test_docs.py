"""The generated parts of the documentation are current, and the README is short."""

import re
from functools import cache
from pathlib import Path

import pytest

from docs import files, generate, recipes, slices
from zero.config import load_config

ROOT = Path(__file__).parents[2]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def tables():
    return recipes.tables() | {"files": files.table()}


# What is in a file, from what is there.
CURRENT = {
    "docs/configuration.md": generate.configuration,
    "docs/trainer-features.md": generate.trainer_features,
    "docs/architecture.md": generate.architecture,
    "README.md": generate.readme,
    "docs/index.md": lambda page: generate.start_page(read("README.md")),
    "docs/slices.svg": lambda picture: slices.svg(),
    "docs/files.svg": lambda picture: files.svg(),
    "docs/recipes.md": lambda page: generate.with_tables(page, tables()),
    "docs/offload.md": lambda page: generate.with_tables(page, tables()),
    "docs/results.md": lambda page: generate.with_tables(page, tables()),
}


@pytest.mark.parametrize("name", CURRENT)
def test_what_is_generated_is_current(name):
    assert read(name) == CURRENT[name](read(name)), "run: python -m docs.generate"


def test_every_key_has_a_table_and_every_page_a_link():
    page = read("docs/configuration.md")
    with pytest.raises(ValueError, match="no table for: data_types: grad_accum_dtype"):
        generate.configuration(page.replace("generate.py: data_types -->", "-->"))
    pages = [page for pages in generate.sections().values() for page in pages]
    assert {*pages, "index.md"} == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_list_of_layers_has_every_module_once():
    names = [name for layer in generate.layers() for name in layer]
    assert len(generate.layers()) > 10
    assert {"tools", "core", "errors", "parallel.pipeline"} <= {*names}
    paths = re.findall("`(.+?)`", generate.list_of_layers())
    assert [path.removesuffix(".py").strip("/").replace("/", ".") for path in paths] == names


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = read("README.md")
    assert len(text.splitlines()) <= 150
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def pages():
    paths = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.stem != "CHANGELOG")


def test_every_name_that_the_pages_find_in_a_file_is_there():
    named = re.findall(r"`([\w.]+)`\s+in\s+`((?:zero|distill|tests)/[\w/]+\.py)`", pages())
    assert len(named) > 10
    for name, path in named:
        assert re.search(rf"\b{name.split('.')[-1]}\b", read(path)), f"{name} is not in {path}"


def test_every_configuration_in_the_pages_is_accepted():
    blocks = re.findall(r"```json\n(.*?)```", pages(), flags=re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        config = load_config(block if block.startswith("{") else f"{{{block}}}", allow_auto=True)
        assert config.origin.ignored == [] == config.origin.renamed
