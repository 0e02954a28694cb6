"""A sample of odd losses and blocks: their batches are split with plain torch's numbers, or not."""

from __future__ import annotations

import pytest

from tests.hunt.splits import CHANGES, judge, none, recipe
from tests.processes import run_on


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sample_of_what_is_split(world_size):
    seeds = list(range((world_size - 1) * len(CHANGES), world_size * len(CHANGES)))
    for verdicts in run_on(world_size, judge, seeds, timeout=280):
        different = [what for _, what in verdicts if what]
        assert not different, "\n".join(different)
        for seed, (is_refused, _) in zip(seeds, verdicts, strict=True):
            drawn = recipe(seed)
            # At stage 0 several processes cannot join each other.
            is_known = drawn.change is none and (drawn.stage or drawn.splits == "slices")
            assert not (is_known and is_refused), str(drawn)
