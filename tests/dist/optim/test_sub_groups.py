"""`sub_group_size`: how many elements are updated at a time.

That it changes no bit is in `tests/parity/test_offload.py`, and its limit in
`tests/dist/core/test_reduction.py`."""

import torch

from tests.dist.training import sgd_engine
from tests.processes import run_on


def sub_groups(rank: int, world_size: int) -> int:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
    return len(sgd_engine(model, sub_group_size=8).optimizer.sub_groups)


def test_tiny_sub_groups_are_merged():
    """A rank has 16,512 elements in one or two groups."""
    assert max(run_on(2, sub_groups)) <= 2 * 65
