"""A sample of the hunt: what a script does with logits in chunks gives plain torch's numbers."""

from __future__ import annotations

import pytest

from tests.hunt import logits
from tests.processes import run_on


@pytest.mark.parametrize(
    ("world_size", "stage", "is_adapted"), [(1, 0, False), (2, 3, False), (2, 3, True)]
)
def test_a_sample_of_uses_of_logits(world_size, stage, is_adapted):
    seeds = list(range(world_size + is_adapted, 300, 3))
    for found in run_on(world_size, logits.judge, stage, seeds, is_adapted):
        assert found == []
