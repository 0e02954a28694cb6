"""What a benchmark makes of its rounds, with the tolerances of `benchmarks.gpu`."""

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
    rounds = [{"b": row(1.0), "c": row(2.0)}, {"a": row(9.0), "b": row(2.0), "c": row(6.0)}]
    base, rows = summary([*rounds, {"b": row(1.0)}], ["a", "b", "c", "d"], missing, TOLERANCES)
    assert base == "b"
    ratios = {name: found["seconds ratio"] for name, found in rows.items()}
    assert ratios == {"a": 4.5, "b": 1.0, "c": 2.5}
    assert missing == {"a": "out of memory", "d": "no such module"}
    for rounds in ([{}], [{"a": row(1.0)}, {"b": row(1.0)}]):
        with pytest.raises(SystemExit, match="no variant finished in all(.|\n)*a: out of memory"):
            summary(rounds, ["a", "b"], missing, TOLERANCES)


@pytest.mark.parametrize(
    ("base", "other", "bad"),
    [
        (LOSSES, [12.02, 11.9, 11.81], []),
        (LOSSES, [12.0, 12.0, 12.0], ["b"]),
        (LOSSES, [12.0, 11.92, 11.83], ["b"]),
        (LOSSES, [12.0, 11.5, 11.8], ["b"]),
        (LOSSES, [12.0, math.nan, 11.8], ["b"]),
        ([12.0, 12.0], [12.0, 12.0], ["a", "b"]),
    ],
)
def test_losses_that_do_not_fall_or_are_not_the_bases_are_a_failure(base, other, bad):
    missing: dict[str, str] = {}
    summary([{"a": row(1.0, base), "b": row(1.0, other)}], ["a", "b"], missing, TOLERANCES)
    assert sorted(missing) == bad
