"""`GatheredParameters`: views that a module keeps, and writes that would be lost. The hunt reads
and writes inside of it at any moment of a step.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import noise, sgd_engine
from tests.processes import run_on
from tests.tolerance import assert_close

WIDTH, ROWS, STEPS = 8, 4, 3
TERMS = 200


def batch(step: int, rank: int) -> torch.Tensor:
    return noise(step, rank, ROWS, WIDTH)


class KeepsView(nn.Linear):
    """Keeps a view of its weight, which shows the weight's values from then on."""

    kept: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = [self.weight.detach().view(-1)]
        return super().forward(x) + 0.1 * self.kept[0][:WIDTH]


def shown_by_views(rank: int, world_size: int) -> None:
    def views() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(KeepsView(WIDTH, WIDTH), nn.Tanh(), KeepsView(WIDTH, WIDTH))

    reference, model = views(), views()
    engine, optimizer = sgd_engine(model), torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(STEPS):
        engine.backward(engine(batch(step, 0)).square().mean())
        engine.step()
        reference(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            with zero.GatheredParameters(model[0].weight, modifier_rank=world_size - 1):
                if rank == world_size - 1:
                    model[0].weight.mul_(0.5)
            with zero.GatheredParameters(model[2].weight):
                pass
            reference[0].weight.mul_(0.5)
            assert_close(engine(batch(step, 0)), reference(batch(step, 0)), TERMS, 10 * STEPS)


def test_views_that_a_module_keeps_show_what_was_written():
    run_on(2, shown_by_views)


def shows(rank: int, world_size: int) -> None:
    """A sharded parameter stays the same object and leaf, with its true shape and dtype."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weight = model[1].weight
    engine = sgd_engine(model)
    with torch.no_grad():
        engine(batch(0, rank))
    assert model[1].weight is weight and isinstance(weight, nn.Parameter)
    assert weight.is_leaf and weight.requires_grad and weight.dtype == torch.float32
    assert weight.shape == (WIDTH, WIDTH) and weight.numel() == WIDTH**2
    assert "'1.weight', sharded over the ranks, shape=(8, 8)" in repr(weight)
    with zero.GatheredParameters(weight):
        assert type(weight) is nn.Parameter and weight.isfinite().all()


def test_a_sharded_parameter_is_the_same_leaf():
    run_on(2, shows)


def lost(rank: int, world_size: int, single: bool) -> list[str]:
    engine, found = sgd_engine(nn.Linear(WIDTH, WIDTH), enable_sanity_checks=True), []
    params = list(engine.module.parameters())
    asked = params[1:2] if single else params
    for write in (lambda: asked[0].data.add_(1.0), lambda: asked[-1].add_(1.0)):
        try:
            with torch.no_grad(), zero.GatheredParameters(asked):
                write()
        except RuntimeError as error:
            found.append(str(error))
    with zero.GatheredParameters(asked, modifier_rank=0):
        asked[0].data.add_(1.0)
    with pytest.raises(ValueError, match=f"modifier_rank is {world_size}"):
        with zero.GatheredParameters(asked, modifier_rank=world_size):
            pass
    if world_size > 1:
        with pytest.raises(ValueError, match="modifier_rank"):
            with zero.GatheredParameters(asked, modifier_rank=rank):
                pass
    return found


@pytest.mark.parametrize("single", [False, True])
def test_a_write_that_would_be_lost_is_named(single):
    for found in run_on(2, lost, single):
        assert len(found) == 2
        assert all("modification of" in each and "modifier_rank" in each for each in found)
