"""The newest tested releases: the table is not older than the pins, and newer ones are named."""

import contextlib
import io
import re
from importlib.metadata import version

import pytest
from packaging.version import Version
from torch import nn

from tests.dist.training import sgd_engine
from tests.processes import REPOSITORY, run_on
from zero import releases
from zero.tools.doctor import checks

PINS = re.findall(
    r"^([\w-]+)==([^\s;]+)",
    "".join((REPOSITORY / f"requirements{part}.txt").read_text() for part in ("", "-dev")),
    re.MULTILINE,
)


@pytest.mark.parametrize("package", releases.NEWEST_TESTED)
def test_the_table_is_not_older_than_the_pins(package):
    pinned = [Version(release) for name, release in PINS if name == package]
    assert pinned and max(pinned) <= Version(releases.NEWEST_TESTED[package])


@pytest.mark.parametrize("package", ["torch", "transformers", "accelerate"])
def test_the_documentation_names_the_newest_tested(package):
    page = (REPOSITORY / "docs" / "compatibility.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| {package} | "))
    assert row.split(" | ")[2] == releases.NEWEST_TESTED[package]


def test_a_newer_library_is_named(monkeypatch):
    monkeypatch.setattr(releases, "NEWEST_TESTED", {"torch": "99.0", "no-such-package": "1.0"})
    assert releases.newer_than_tested() == ""
    monkeypatch.setitem(releases.NEWEST_TESTED, "accelerate", "0.9.9")
    said = f"accelerate {version('accelerate')} is newer than the newest tested, 0.9.9"
    assert releases.newer_than_tested() == said
    (found,) = (each for each in checks.findings(None) if each.check == "newest tested")
    assert found.level == checks.OK and found.found.endswith("the newest tested, 0.9.9")


@pytest.mark.parametrize(
    ("tested", "found", "is_newer"),
    [
        ("5.24.0", "5.24.1", True),
        ("5.24.0", "5.100", True),
        ("5.24.0", "5.24.0.dev0", False),
        ("2.15.0", "2.15.0+cu130", False),
        ("2.15.0", "2.16.0a0+git1234", True),
    ],
)
def test_releases_are_compared_by_their_numbers(tested, found, is_newer, monkeypatch):
    monkeypatch.setattr(releases, "NEWEST_TESTED", {"torch": tested})
    monkeypatch.setattr(releases, "version", lambda package: found)
    assert bool(releases.newer_than_tested()) is is_newer


def test_a_run_names_it_once_on_rank_0():
    first, second = run_on(2, start_with_a_newer_library)
    assert first == 1 and second == 0


def start_with_a_newer_library(rank, world_size):
    releases.NEWEST_TESTED["torch"] = "1.0.0"
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        for _ in range(2):  # as a Trainer, which makes an engine for each training
            sgd_engine(nn.Linear(2, 2))
    return printed.getvalue().count("is newer than the newest tested, 1.0.0")
