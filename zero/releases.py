"""Releases of other libraries: those that are installed, and the newest that have been tested.

A release that is newer than the newest tested is no error: it is named at the start of a run and by
`zero doctor`, because it is the first thing to look at if something is odd.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEWEST_TESTED: dict[str, str] = json.loads(
    Path(__file__).with_name("releases.json").read_text("utf-8")
)


def installed(package: str) -> str:
    """The installed release; "" if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def newer_than_tested() -> str:
    """Which of the installed libraries are newer, in one line; "" if none is."""
    return "; ".join(
        f"{package} {found} is newer than the newest tested, {tested}"
        for package, tested in NEWEST_TESTED.items()
        if _numbers(found := installed(package)) > _numbers(tested)
    )


def _numbers(release: str) -> list[int]:
    """[2, 15, 0] of 2.15.0, and of its release candidates and builds."""
    return [int(number) for number in re.findall(r"\d+", release)[:3]]
