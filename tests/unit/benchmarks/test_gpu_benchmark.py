"""What a benchmark makes of its rounds, with the tolerances of `benchmarks.gpu`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.gpu.__main__ import TOLERANCES
from benchmarks.runner import summary

LOSSES = [12.0, 11.9, 11.8]


def row(seconds: float, losses: list[float] = LOSSES) -> dict[str, Any]:
    return {"seconds": seconds, "losses": losses}


def test_ratios_are_within_rounds_to_the_first_variant_that_finished_in_each():
    missing = {"a": "out of memory", "d": "no such module"}
    rounds = [
        {"b": row(1.0), "c": row(2.0)},
        {"a": row(9.0), "b": row(2.0), "c": row(6.0)},
        {"b": row(1.0)},
    ]
    base, rows = summary(rounds, ["a", "b", "c", "d"], missing, TOLERANCES)
    assert base == "b"
    assert {name: found["seconds ratio"] for name, found in rows.items()} == {
        "a": 4.5,
        "b": 1.0,
        "c": 2.5,
    }
    assert missing == {"a": "out of memory", "d": "no such module"}


def test_without_a_base_the_run_says_what_failed():
    missing = {"a": "out of memory", "b": "no such module"}
    for rounds in ([{}], [{"a": row(1.0)}, {"b": row(1.0)}]):
        with pytest.raises(
            SystemExit,
            match="no variant finished in all(.|\\n)*a: out of memory\nb: no such module",
        ):
            summary(rounds, ["a", "b"], missing, TOLERANCES)


@pytest.mark.parametrize(
    "losses",
    [[12.0, 12.0, 12.0], [12.0, 11.92, 11.83], [12.0, 11.5, 11.8], [12.0, math.nan, 11.8]],
    ids=str,
)
def test_other_losses_than_the_bases_are_a_failure(losses):
    missing: dict[str, str] = {}
    summary(
        [{"a": row(1.0), "b": row(1.0, losses), "c": row(1.0, [12.02, 11.9, 11.81])}],
        ["a", "b", "c"],
        missing,
        TOLERANCES,
    )
    assert list(missing) == ["b"] and missing["b"].startswith("not the same training")


def test_a_base_whose_losses_do_not_fall_is_a_failure():
    missing: dict[str, str] = {}
    summary([{"a": row(1.0, [12.0, 12.0])}], ["a"], missing, TOLERANCES)
    assert list(missing) == ["a"]
