"""`sub_group_size`: how many elements are updated at a time."""

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import ds_config
from tests.processes import run_on


def train(
    rank: int, world_size: int, size: int, optimizer: str, offload: dict
) -> tuple[int, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    config = ds_config(optimizer={"type": optimizer}, sub_group_size=size, **offload)
    engine, *_ = zero.initialize(model=model, config=config)
    for _ in range(3):
        engine.backward(engine(torch.randn(2, 128)).square().mean())
        engine.step()
    with zero.GatheredParameters(list(model.parameters())):
        weights = [param.detach().clone() for param in model.parameters()]
    return len(engine.optimizer.sub_groups), weights


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "cpu"}}])
def test_tiny_sub_groups_are_merged_and_give_the_same_bits(optimizer, offload):
    (tiny, updated), *_ = run_on(2, train, 8, optimizer, offload)
    (_, whole), *_ = run_on(2, train, 10**9, optimizer, offload)
    assert tiny <= 2 * 65, "a rank has 16,512 elements in one or two groups"
    assert all(map(torch.equal, updated, whole))
