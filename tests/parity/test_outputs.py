"""Results and inputs whose hooks, which unshard and reshard weights for backward, are a case of
their own. The hunt has results in whatever a module returns.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dist.training import noise, sgd_engine
from tests.processes import run_on
from zero.errors import UsageError

WIDTH, RATE = 8, 0.1


def batch(step: int, rank: int) -> torch.Tensor:
    return noise(step, rank, 4, WIDTH)


class Aside(nn.Module):
    """Returns one result and keeps another, which depends on other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x + 1
        # Autograd runs this first, before it comes to the result.
        self.aside = torch.tanh(x @ self.first) @ self.second
        return result


def is_refused(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Aside(), nn.Linear(WIDTH, WIDTH))
    engine = sgd_engine(model, RATE, stage3_max_live_parameters=0)
    loss = engine(batch(0, rank)).square().mean() + model[1].aside.square().mean()
    with pytest.raises(UsageError, match=r"'1.second'.*result of Aside.*Return it"):
        engine.backward(loss)


def test_a_result_kept_beside_another():
    run_on(2, is_refused)


class Prompted(nn.Module):
    """The input of a frozen block is a leaf that lives as long as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(4, WIDTH))
        self.block = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.block(self.prompt) + x).square().mean()


def hooks_end(rank: int, world_size: int) -> None:
    model = Prompted()
    engine = sgd_engine(model, RATE)
    counts = []
    for step in range(4):
        engine.backward(engine(batch(step, rank)))
        engine.step()
        counts.append(len(model.prompt._backward_hooks or {}))
    assert counts[1] == counts[3], counts


def test_hooks_on_a_learned_input_do_not_pile_up():
    run_on(2, hooks_end)
