"""Derivatives that a script takes itself, beside the backward of its loss: as in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from tests.dist.training import assert_close_to, noise, sgd_engine
from tests.processes import run_on
from zero.errors import UsageError

WIDTH, ROWS, STEPS, LR = 8, 4, 3, 0.05
# About the inner lengths of four layers, which a second derivative passes four times.
TERMS = 500

Backward = Callable[..., None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(x))


def of_input(net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward) -> None:
    """A saliency map before the backward, from the same graph."""
    x.requires_grad_()
    out = net(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    backward((out * gradient.norm()).square().mean())


def of_another_forward(
    net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward
) -> None:
    """Adversarial inputs: the graph of the first forward is used for its derivative only."""
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).square().mean(), x)
    backward(net((x + 0.1 * gradient.sign()).detach()).square().mean())


def by_backward_to_input(
    net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward
) -> None:
    x.requires_grad_()
    net(x).square().mean().backward(inputs=[x])
    assert x.grad is not None
    backward(net((x + 0.1 * x.grad.sign()).detach()).square().mean())


def of_parameters(net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward) -> None:
    loss = net(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    backward(loss * sum(float(gradient.norm()) for gradient in gradients))


def penalty(net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward) -> None:
    """A gradient penalty: the derivative is differentiated once more."""
    x.requires_grad_()
    out = net(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    backward(out.square().mean() + gradient.square().sum())


def penalty_alone(net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward) -> None:
    """A backward of the loss and one of a penalty with a forward of its own, as for a critic."""
    backward(net(x).square().mean())
    mixed = (x * 0.5).requires_grad_()
    (gradient,) = torch.autograd.grad(net(mixed).sum(), mixed, create_graph=True)
    backward((gradient.norm(dim=1) - 1).square().mean())


def sharpness(net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward) -> None:
    """The norm of the gradient of all weights as a part of the loss."""
    loss = net(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    backward(loss + sum(gradient.square().sum() for gradient in gradients))


def mapped(net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward) -> None:
    backward(torch.func.vmap(net)(x).square().mean())


def of_each_output(net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward) -> None:
    """A Jacobian, whose rows are computed by vmap."""
    rows = torch.autograd.functional.jacobian(
        lambda given: net(given).sum(0), x, create_graph=True, vectorize=True
    )
    backward(rows.square().sum() + net(x).square().mean())


def forward_mode(net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward) -> None:
    with forward_ad.dual_level():
        out, change = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x))))
        backward(out.square().mean() + change.square().mean())


def functional_calls(net: nn.Module, model: nn.Module, x: torch.Tensor, backward: Backward) -> None:
    """With the values of parameters as arguments: only where they are not sharded."""

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).square().mean()

    gradients = torch.func.grad(loss)(dict(model.named_parameters()))
    rows = torch.func.jacrev(lambda given: net(given).sum(0))(x)
    factor = sum(float(gradient.norm()) for gradient in gradients.values())
    backward(factor * net(x).square().mean() + rows.square().sum())


RECIPES = {
    recipe.__name__: recipe
    for recipe in (
        *(of_input, of_another_forward, by_backward_to_input, of_parameters),
        *(penalty, penalty_alone, sharpness),
        *(mapped, of_each_output, forward_mode, functional_calls),
    )
}

FUNCTIONAL_SHARDED = ("functional_calls", 3)


def batch(step: int, rank: int) -> torch.Tensor:
    return noise(step, rank, ROWS, WIDTH)


def train_plain(recipe: Callable, ranks: int) -> nn.Module:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        for rank in range(ranks):
            recipe(model, model, batch(step, rank), lambda loss: (loss / ranks).backward())
        optimizer.step()
        optimizer.zero_grad()
    return model


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def follows(rank: int, world_size: int, name: str, stage: int, ignores_unused: bool) -> list[str]:
    recipe = RECIPES[name]
    messages = Messages()
    logging.getLogger("zero").addHandler(messages)
    torch.manual_seed(1)
    model = Net()
    keys = {"stage3_max_live_parameters": 0, "ignore_unused_parameters": ignores_unused}
    engine = sgd_engine(model, LR, stage=stage, **keys)
    for step in range(STEPS):
        recipe(engine, model, batch(step, rank), engine.backward)
        engine.step()
    assert_close_to(model, train_plain(recipe, world_size), TERMS, STEPS)
    assert engine.residency.live == 0
    engine.destroy()
    return [text for text in messages.texts if "gradient" in text]


# torch.func differentiates what is not sharded; for stage 3 see the next test.
@pytest.mark.parametrize(
    ("name", "stage"),
    [(name, stage) for name in RECIPES for stage in (1, 3) if (name, stage) != FUNCTIONAL_SHARDED],
)
def test_a_derivative_is_no_backward(name, stage):
    ignores_unused = name == "penalty_alone"  # the bias of the head has no part in it
    assert run_on(2, follows, name, stage, ignores_unused) == [[], []]


def functional(net: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    torch.func.grad(lambda given: net(given).sum())(x)


def functional_of_parameters(net: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    """torch.func wraps what the parameters show when it is called, which is NaN."""

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).sum()

    net(x)
    torch.func.grad(loss)(dict(model.named_parameters()))


def graph_in_gradients(net: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    net(x).sum().backward(create_graph=True)


REFUSED = {
    functional: r"group 'blocks.0' .*is sharded.* torch.func.grad.*use torch.autograd.grad",
    functional_of_parameters: r"is sharded.* torch.func.grad.*use torch.autograd.grad",
    graph_in_gradients: r"create_graph=True\).*use torch.autograd.grad\(loss, parameters, create",
}


def refuses(rank: int, world_size: int) -> None:
    model = Net()
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
