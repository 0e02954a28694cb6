"""Gradients that come after their group's reduction has started, on one rank alone, and those that
come twice.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import loss_of, sgd_engine
from tests.processes import on_ranks
from tests.tolerance import assert_close
from zero.fragments import safe_get_full_grad

WIDTH = 4


class Experts(nn.Module):
    """The first rank uses both experts. The second one has no gradient for the second expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        y = self.experts[0](x)
        return torch.tanh(y + self.experts[1](x) if uses_all else y)


class Model(nn.Module):
    """Calls its block twice, each time in a checkpoint of its own."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Experts()])

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = self.before(x)
        for _ in range(2):
            if self.reentrant:
                x = checkpoint(self.blocks[0], x, uses_all, use_reentrant=True)
            else:
                x = self.blocks[0](x, uses_all)
        return x.square().mean()


@pytest.mark.parametrize(
    ("stage", "reentrant"),
    [
        (1, [True, True]),
        (2, [True, True]),
        (3, [True, True]),
        (1, [True, False]),
        (2, [False, True]),
    ],
)
@on_ranks(2, timeout=60.0)
def test_all_ranks_join_in_the_reduction(rank, world_size, stage, reentrant):
    torch.manual_seed(4)
    model, reference = Model(reentrant[rank]), Model()
    reference.load_state_dict(model.state_dict())
    zero.leaf.set_z3_leaf_modules(model, [Experts])
    engine = sgd_engine(model, stage=stage, watchdog_timeout=5)
    parts = torch.randn(world_size, 3, WIDTH)
    for _ in range(3):
        engine.backward(engine(parts[rank], rank == 0))
    for part in range(world_size):
        (reference(parts[part], part == 0) * 3 / world_size).backward()
    for (name, param), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        found = safe_get_full_grad(param)
        assert_close(found, expected.grad, 100, 3, name)
    engine.step()
    engine.destroy()


@on_ranks(2)
def test_a_layer_that_checkpointed_blocks_share_gets_both_gradients(rank, world_size):
    """Each of two checkpointed blocks runs a backward of its own, which gives the layer that they
    share a gradient.
    """
    models = [toy(checkpointing="reentrant") for _ in range(2)]
    for model in models:
        model.blocks[2].up = model.blocks[0].up
    (batch,) = toy_batches(1)
    engine, plain = sgd_engine(models[0]), models[1]
    engine.backward(engine(**batch))
    loss_of(plain(**batch)).backward()
    found = safe_get_full_grad(engine.module.blocks[0].up.weight)
    assert_close(found, plain.blocks[0].up.weight.grad, 100)
