"""Releases of other libraries: those that are installed, and the newest that have been tested.

A release that is newer than the newest tested is no error: it is named at the start of a run and by
`zero doctor`, because it is the first thing to look at if something is odd.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

NEWEST_TESTED = {
    "torch": "2.15.0",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "trl": "1.16.0",
    "bitsandbytes": "0.50.2",
    "torchao": "0.18.0",
    "safetensors": "0.8.0",
}


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
