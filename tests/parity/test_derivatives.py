"""Derivatives by `torch.func`, and what a script may not take or keep of a graph. The hunt compares
all else with plain torch.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import noise, sgd_engine
from tests.processes import run_on
from zero.errors import UsageError

WIDTH, ROWS = 8, 4


class Aside(nn.Linear):
    """Returns one result and keeps another, which depends on other weights."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x + 1
        # Autograd runs this first, before it comes to the result.
        self.aside = torch.tanh(super().forward(x)) @ self.second
        return result


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Aside(), nn.Linear(WIDTH, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    return noise(step, rank, ROWS, WIDTH)


def differentiates(rank: int, world_size: int) -> None:
    model, x = net(), batch(0, rank)
    engine = sgd_engine(model, stage=1)
    params = {name: param for name, param in model.named_parameters() if not name.startswith("1")}

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, given, (x,)).sum()

    expected = torch.autograd.grad(engine(x).sum(), [*params.values()])
    found = torch.func.grad(loss)(params)
    for mine, own in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(mine, own)


def test_functions_of_parameters_that_are_not_sharded():
    run_on(2, differentiates)


def functional(engine: zero.ZeroEngine, x: torch.Tensor) -> None:
    torch.func.grad(lambda given: engine(given).sum())(x)


def functional_of_parameters(engine: zero.ZeroEngine, x: torch.Tensor) -> None:
    """torch.func wraps what the parameters show when it is called, which is NaN."""

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(engine.module, params, (x,)).sum()

    engine(x)
    torch.func.grad(loss)(dict(engine.module.named_parameters()))


def graph_in_gradients(engine: zero.ZeroEngine, x: torch.Tensor) -> None:
    engine(x).sum().backward(create_graph=True)


def kept_beside_another(engine: zero.ZeroEngine, x: torch.Tensor) -> None:
    loss = engine(x).square().mean() + engine.module[1].aside.square().mean()
    engine.backward(loss)


def no_such_rank(engine: zero.ZeroEngine, x: torch.Tensor) -> None:
    with zero.GatheredParameters(engine.module.parameters(), modifier_rank=2):
        pass


REFUSED = {
    functional: r"group '0.*is sharded.* torch.func.grad.*use torch.autograd.grad",
    functional_of_parameters: r"is sharded.* torch.func.grad.*use torch.autograd.grad",
    graph_in_gradients: r"create_graph=True\).*use torch.autograd.grad\(loss, parameters, create",
    kept_beside_another: r"'1.second'.*result of Aside.*Return it",
    no_such_rank: "modifier_rank is 2",
}


def refuses(rank: int, world_size: int) -> None:
    for recipe, message in REFUSED.items():
        engine = sgd_engine(net(), stage3_max_live_parameters=0)
        with pytest.raises(UsageError, match=message):
            recipe(engine, batch(0, rank))
        engine.hooks.forget_broken_pass()
        engine.zero_grad()
        engine.backward(engine(batch(0, rank)).square().mean())
        engine.step()


@pytest.mark.filterwarnings("ignore:Using backward")  # torch warns of create_graph=True
def test_what_cannot_be_computed_is_refused_by_name():
    run_on(2, refuses)


class Prompted(nn.Module):
    """The input of a frozen block is a leaf that lives as long as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.block = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.block(self.prompt) + x).square().mean()


def hooks_end(rank: int, world_size: int) -> None:
    model, counts = Prompted(), []
    engine = sgd_engine(model)
    for step in range(4):
        engine.backward(engine(batch(step, rank)))
        engine.step()
        counts.append(len(model.prompt._backward_hooks or {}))
    assert counts[1] == counts[3], counts


def test_hooks_on_a_learned_input_do_not_pile_up():
    run_on(2, hooks_end)
