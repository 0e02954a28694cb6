"""A script that cuts the graph in two, and carries the gradient over the cut itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero
from tests.dist.toys import messages
from tests.dist.training import sgd_engine
from tests.processes import on_ranks
from tests.tolerance import assert_close

WIDTH, STEPS, RATE = 4, 2, 0.1


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("by_engine", [False, True])
@on_ranks(2)
def test_gradients_carried_by_the_script(rank, world_size, stage, by_engine):
    """They are those of plain torch if the script runs all backwards.

    After `engine.backward` they are divided by the accumulation twice, which a warning tells once.
    """
    trained, reference = model(), model()
    engine = sgd_engine(trained, RATE, stage=stage, accumulation=STEPS)
    warnings = messages()
    inputs = torch.randn(STEPS, world_size, 3, WIDTH)
    for part in inputs:
        hidden = trained[0](part[rank])
        given = hidden.detach().requires_grad_()
        loss = trained[1](given).square().mean()
        if by_engine:
            engine.backward(loss)
        else:
            engine.scale(loss).backward()
        hidden.backward(given.grad)
        engine.step()
    losses = [reference(x).square().mean() for x in inputs.flatten(0, 1)]
    (sum(losses) / len(losses)).backward()
    with zero.GatheredParameters(trained.parameters()):
        for (name, param), plain in zip(
            trained.named_parameters(), reference.parameters(), strict=True
        ):
            first_layer = name.startswith("0.")
            factor = 1 / STEPS if by_engine and first_layer else 1.0
            expected = plain.detach() - RATE * factor * plain.grad
            assert_close(param.detach(), expected, 100, 2, name)
    told = [warning for warning in warnings if "twice" in warning and "engine.scale" in warning]
    assert len(told) == by_engine, warnings
