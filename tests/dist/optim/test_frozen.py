"""All ranks must freeze the same parameters. What freezing changes is in the hunt, and in
`tests/parity/test_unused.py`, as for all parameters without a gradient."""

from __future__ import annotations

import pytest

from tests.dist.toys import toy, toy_batches
from tests.dist.training import ds_config, loss_of, start
from tests.processes import run_on


def alone(rank: int, world_size: int, stage: int) -> str:
    """The last rank freezes a parameter that the others train."""
    engine, _ = start(toy(), ds_config(stage=stage))
    for number, batch in enumerate(toy_batches(2)):
        if number and rank == world_size - 1:
            engine.module.head.weight.requires_grad_(False)
        engine.backward(loss_of(engine(**batch)))
        if not number:
            engine.step()
    with pytest.raises(ValueError, match="the ranks disagree") as raised:
        engine.step()
    return str(raised.value)


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (3, 3)])
def test_a_rank_that_freezes_alone_is_named(stage, world_size):
    for message in run_on(world_size, alone, stage):
        assert f"frozen parameters: none on rank 0, head.weight on rank {world_size - 1}" in message
