"""Parameters that a script freezes and thaws at any moment of a step: as in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import ds_config
from tests.processes import run_on
from tests.tolerance import assert_close

WIDTH, ROWS, STEPS, MICRO = 8, 4, 4, 2
TERMS = 200

# From the step and the moment in it to whether the first layer trains; None changes nothing.
Plan = Callable[[int, str], bool | None]


def between_backward_and_step(step: int, moment: str) -> bool | None:
    """As a script that alternates between two models does: the gradients there still count."""
    return {"begin": True, "before step": False}.get(moment)


def thawed_before_step(step: int, moment: str) -> bool | None:
    """The first step trains all; then there is no gradient, only momentum."""
    return {"begin": step == 0, "before step": True}.get(moment)


def between_micro_batches(step: int, moment: str) -> bool | None:
    return {"begin": True, "between": step % 2 == 0}.get(moment)


def between_forward_and_backward(step: int, moment: str) -> bool | None:
    return {"begin": True, "after forward": step == 0}.get(moment)


PLANS = {
    plan.__name__: plan
    for plan in (
        between_backward_and_step,
        thawed_before_step,
        between_micro_batches,
        between_forward_and_backward,
    )
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    seed = 100 * step + 10 * micro + rank
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(
    model: nn.Sequential,
    plan: Plan,
    losses: Callable[[int, int], list[torch.Tensor]],
    backward: Callable[[torch.Tensor], object],
    end_micro: Callable[[bool], None],
) -> None:
    def at(moment: str) -> None:
        trains = plan(step, moment)
        if trains is not None:
            model[0].requires_grad_(trains)

    for step in range(STEPS):
        at("begin")
        for micro in range(MICRO):
            for loss in losses(step, micro):
                at("after forward")
                backward(loss)
            if micro == 0:
                at("between")
            else:
                at("before step")
            end_micro(micro == MICRO - 1)


def train_plain(plan: Plan, ranks: int) -> nn.Sequential:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def losses(step: int, micro: int) -> list[torch.Tensor]:
        return [
            sum(model(batch(step, micro, rank)).square().mean() for rank in range(ranks))
            / (ranks * MICRO)
        ]

    def end_micro(is_last: bool) -> None:
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    train(model, plan, losses, lambda loss: loss.backward(), end_micro)
    return model


def follows(rank: int, world_size: int, name: str, stage: int) -> None:
    model = net()
    config = ds_config(stage=stage, stage3_param_persistence_threshold=0)
    config["gradient_accumulation_steps"] = MICRO
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    train(
        model,
        PLANS[name],
        lambda step, micro: [engine(batch(step, micro, rank)).square().mean()],
        engine.backward,
        lambda is_last: engine.step(),
    )
    reference = train_plain(PLANS[name], world_size)
    with zero.GatheredParameters(model.parameters()):
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(param, expected, TERMS, STEPS, name)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_a_gradient_counts_whenever_its_parameter_is_frozen(name, stage):
    run_on(2, follows, name, stage)
