"""Odd models train as in plain torch, or are refused by name: each oddity alone, and a sample of
the hunt. Samples of odd uses of logits, losses and blocks that are split, saves, and damaged files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hunt import TIMES, damage, logits, saves, splits
from tests.hunt.hunt import DIFFERENT, EQUAL, Verdict, hunt
from tests.hunt.models import alone, recipe
from tests.processes import run_on

# Far apart, so that they begin with different parts.
SEEDS = range(7, 1000 * TIMES, 83)


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


@pytest.mark.parametrize(
    ("world_size", "stage", "is_adapted"), [(1, 0, False), (2, 3, False), (2, 3, True)]
)
def test_a_sample_of_uses_of_logits(world_size, stage, is_adapted):
    seeds, timeout = list(range(world_size + is_adapted, 300 * TIMES, 3)), 120 * TIMES
    for found in run_on(world_size, logits.judge, stage, seeds, is_adapted, timeout=timeout):
        assert found == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sample_of_what_is_split(world_size):
    number = len(splits.CHANGES) * TIMES
    seeds = list(range((world_size - 1) * number, world_size * number))
    for verdicts in run_on(world_size, splits.judge, seeds, timeout=280 * TIMES):
        different = [what for _, what in verdicts if what]
        assert not different, "\n".join(different)
        for seed, (is_refused, _) in zip(seeds, verdicts, strict=True):
            drawn = splits.recipe(seed)
            # At stage 0 several processes cannot join each other.
            is_known = drawn.change is splits.none and (drawn.stage or drawn.splits == "slices")
            is_known = is_known and drawn.loss is not splits.of_embeddings
            assert not (is_known and is_refused), str(drawn)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sample_of_what_is_saved(world_size: int, tmp_path: Path):
    names = list(saves.MAKERS)
    others = [(name, number % 3) for number, name in enumerate(names)]
    tasks = others if world_size == 1 else [(name, 3) for name in names]
    verdicts = run_on(world_size, saves.judge, str(tmp_path), tasks, timeout=200)[0]
    different = [what for _, what in verdicts if what]
    assert not different, "\n".join(different)
    refused = {task: why for task, (why, _) in zip(tasks, verdicts, strict=True) if why}
    assert refused.keys() == saves.REFUSED & {*tasks}, refused


def test_a_sample_of_damaged_files(tmp_path: Path):
    (faults,) = run_on(1, damage.judge_all, str(tmp_path), range(150 * TIMES), timeout=200 * TIMES)
    assert not faults, "\n".join(faults)
