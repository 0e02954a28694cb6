"""Outputs of any form: gradients are those of plain torch, wherever a module puts its result.

A backward hook on a module's result is what unshards its weights for backward. So results have to
be found in whatever a module returns, and where none is found, the weights must stay."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import assert_close_to, noise, sgd_engine
from tests.processes import run_on
from tests.tolerance import assert_close
from zero.errors import UsageError

WIDTH, RATE = 8, 0.1


class Plain:
    def __init__(self, result: torch.Tensor):
        self.result = result


@dataclass(slots=True)
class Slotted:
    result: torch.Tensor


class Slots:
    __slots__ = ("result",)

    def __init__(self, result: torch.Tensor):
        self.result = result


class Inner(nn.Module):
    """Two matrices in a row: the gradient of the first one needs the second one's values."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        result = torch.tanh(x @ self.first) @ self.second
        match self.kind:
            case "object":
                return Plain(result)
            case "nested object":
                return {"inner": [Plain(Plain(result))]}
            case "slotted":
                return Slotted(result)
            case "slots":
                return Slots(result)
            case "mapping":
                return UserDict(result=result)
            case "set":
                return {result}
            case "kept on the module":
                self.result = result
                return None
            case "written to an argument":
                target.copy_(result)
                return None


class Model(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = Inner(kind)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.before(x))
        target = torch.zeros_like(hidden)
        found = self.inner(hidden, target)
        match self.inner.kind:
            case "object" | "slotted" | "slots":
                found = found.result
            case "nested object":
                found = found["inner"][0].result.result
            case "mapping":
                found = found["result"]
            case "set":
                (found,) = found
            case "kept on the module":
                found = self.inner.result
            case "written to an argument":
                found = target
        return self.after(torch.tanh(found)).square().mean()


KINDS = (
    "object", "nested object", "slotted", "slots", "mapping", "set", "kept on the module",
    "written to an argument",
)  # fmt: skip


def build(kind: str) -> Model:
    torch.manual_seed(1)
    return Model(kind)


def batch(step: int, rank: int) -> torch.Tensor:
    return noise(step, rank, 4, WIDTH)


def follows_plain_torch(rank: int, world_size: int) -> None:
    for kind in KINDS:
        model, reference = build(kind), build(kind)
        engine = sgd_engine(model, RATE, stage3_max_live_parameters=0)
        plain = torch.optim.SGD(reference.parameters(), lr=RATE)
        for step in range(3):
            engine.backward(engine(batch(step, rank)))
            engine.step()
            for part in range(world_size):
                (reference(batch(step, part)) / world_size).backward()
            plain.step()
            plain.zero_grad()
            assert engine.residency.live == 0, kind
        assert_close_to(model, reference, 100, 3, kind)
        engine.destroy()


def test_gradients_of_results_anywhere():
    run_on(2, follows_plain_torch)


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


class Scaled(nn.Embedding):
    """Multiplies by its own weight: unlike an embedding's, its backward needs the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) @ self.weight.t()) @ self.weight


class Prompted(nn.Module):
    """The input of a frozen block is a leaf that lives as long as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(4, WIDTH))
        self.block = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.block(self.prompt) + x).square().mean()


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Scaled(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[:, 0] > 0).long()).square().mean()


def embedding_with_a_product(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = Looked()
    reference = Looked()
    reference.load_state_dict(model.state_dict())
    engine = sgd_engine(model, stage3_max_live_parameters=0)
    engine.backward(engine(batch(0, rank)))
    for part in range(world_size):
        (reference(batch(0, part)) / world_size).backward()
    found = zero.fragments.safe_get_full_grad(model.table.weight)
    assert_close(found, reference.table.weight.grad, 100, 1, "gradient")


def test_an_embedding_that_multiplies_by_its_weight():
    run_on(2, embedding_with_a_product)


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


@dataclass
class Linked:
    result: torch.Tensor
    parent: Any = None


class Odd(nn.Module):
    """Takes a structure with a circle, and returns a sparse tensor beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, linked: Linked) -> tuple[torch.Tensor, torch.Tensor]:
        return linked.result @ self.weight, torch.eye(2).to_sparse()


class Circle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        child = Linked(x)
        child.parent = Linked(x, child)
        return self.odd(child)[0].square().mean()


def odd_structures(rank: int, world_size: int) -> None:
    engine = sgd_engine(Circle(), RATE)
    engine.backward(engine(batch(0, rank)))
    engine.step()
    assert engine.get_global_grad_norm() > 0


def test_circles_and_sparse_tensors():
    run_on(2, odd_structures)
