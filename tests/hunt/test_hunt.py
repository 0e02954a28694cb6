"""Odd models train as in plain torch, or are refused by name: each oddity alone, and a sample of
the hunt.
"""

from __future__ import annotations

import pytest

from tests.hunt.hunt import DIFFERENT, EQUAL, Verdict, hunt
from tests.hunt.models import alone, recipe

# Far apart, so that they begin with different parts.
SEEDS = range(7, 1000, 83)


def assert_none_differs(verdicts: list[Verdict]) -> None:
    different = [verdict for verdict in verdicts if verdict.outcome == DIFFERENT]
    assert not different, "\n".join(str(verdict) for verdict in different)
    refused = {verdict.seed for verdict in verdicts if verdict.outcome != EQUAL}
    legal = [seed for seed in refused if not recipe(seed).may_be_refused]
    assert not legal, f"refused: {[str(recipe(seed)) for seed in legal]}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sample_of_odd_models(world_size):
    tasks = [(seed, number) for seed in SEEDS[world_size - 1 :: 2] for number in range(4)]
    assert_none_differs(hunt(tasks, world_size))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_part_wrapper_and_way_of_training_alone(number):
    """At stage 2, and at stage 3 with and without offload."""
    assert_none_differs(hunt([(each.seed, number) for each in alone()], 2))
