"""A sample of the hunt: what a script does with logits in chunks gives plain torch's numbers."""

from __future__ import annotations

import pytest

from tests.hunt import logits
from tests.processes import run_on


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 3)])
def test_a_sample_of_uses_of_logits(world_size, stage):
    seeds = list(range(world_size, 300, 3))
    for found in run_on(world_size, logits.judge, stage, seeds):
        assert found == []
