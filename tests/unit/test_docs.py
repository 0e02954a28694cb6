"""The generated parts of the documentation are current, and the README is short."""

import re
from pathlib import Path

import pytest

from docs import files, generate, recipes, slices
from zero.config import load_config

ROOT = Path(__file__).parents[2]
REMEDY = "run: python -m docs.generate"


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_page_of_all_keys_is_current_and_has_every_key():
    page = read("docs/configuration.md")
    assert page == generate.configuration(page), REMEDY
    with pytest.raises(ValueError, match="no table for: data_types: grad_accum_dtype"):
        generate.configuration(page.replace("generate.py: data_types -->", "-->"))


def test_the_predictions_are_current():
    tables = recipes.tables() | {"files": files.table()}
    for name in ("docs/recipes.md", "docs/offload.md", "docs/results.md"):
        page = read(name)
        assert page == generate.with_tables(page, tables), REMEDY


def test_pictures_are_current():
    assert read("docs/slices.svg") == slices.svg(), REMEDY
    assert read("docs/files.svg") == files.svg(), REMEDY


def test_the_table_of_what_the_trainer_can_do_is_current():
    page = read("docs/trainer-features.md")
    assert page == generate.trainer_features(page), REMEDY


def test_the_list_of_the_layers_is_current():
    page = read("docs/architecture.md")
    assert page == generate.architecture(page), REMEDY


def test_the_readme_lists_every_page_and_the_site_begins_with_it():
    readme = read("README.md")
    assert readme == generate.readme(readme), REMEDY
    assert read("docs/index.md") == generate.start_page(readme), REMEDY
    pages = [page for pages in generate.sections().values() for page in pages]
    assert sorted([*pages, "index.md"]) == sorted(
        path.name for path in (ROOT / "docs").glob("*.md")
    )


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
