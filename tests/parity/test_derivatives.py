"""Derivatives by `torch.func`, and those that a script may not take. The hunt compares all others
with plain torch.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dist.training import noise, sgd_engine
from tests.processes import run_on
from zero.errors import UsageError

WIDTH, ROWS, LR = 8, 4, 0.05


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    return noise(step, rank, ROWS, WIDTH)


def differentiates(rank: int, world_size: int) -> None:
    model, x = net(), batch(0, rank)
    engine = sgd_engine(model, LR, stage=1)
    params = dict(model.named_parameters())

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, given, (x,)).sum()

    expected = torch.autograd.grad(engine(x).sum(), [*params.values()])
    found = torch.func.grad(loss)(params)
    for mine, own in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(mine, own)


def test_functions_of_parameters_that_are_not_sharded():
    run_on(2, differentiates)


def functional(engine: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    torch.func.grad(lambda given: engine(given).sum())(x)


def functional_of_parameters(engine: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    """torch.func wraps what the parameters show when it is called, which is NaN."""

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).sum()

    engine(x)
    torch.func.grad(loss)(dict(model.named_parameters()))


def graph_in_gradients(engine: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    engine(x).sum().backward(create_graph=True)


REFUSED = {
    functional: r"group '0.*is sharded.* torch.func.grad.*use torch.autograd.grad",
    functional_of_parameters: r"is sharded.* torch.func.grad.*use torch.autograd.grad",
    graph_in_gradients: r"create_graph=True\).*use torch.autograd.grad\(loss, parameters, create",
}


def refuses(rank: int, world_size: int) -> None:
    model = net()
    engine = sgd_engine(model, LR)
    for recipe, message in REFUSED.items():
        with pytest.raises(UsageError, match=message):
            recipe(engine, model, batch(0, rank))
        engine.hooks.forget_broken_pass()
    engine.backward(engine(batch(0, rank)).square().mean())
    engine.step()


@pytest.mark.filterwarnings("ignore:Using backward")  # torch warns of create_graph=True
def test_what_cannot_be_computed_is_refused_by_name():
    run_on(2, refuses)
