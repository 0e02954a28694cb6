"""Scripts that work on `.grad` themselves, which has no effect: they are told once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zero
from tests.dist.toys import messages
from tests.dist.training import sgd_engine
from tests.processes import on_ranks, run_on


def clips_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clamps_the_largest(model: nn.Module) -> None:
    param = max(model.parameters(), key=torch.Tensor.numel)
    if param.grad is not None:
        param.grad.view(-1).clamp_(min=0.1)


def replaces(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


def clears(model: nn.Module) -> None:
    model.to("cpu")
    for param in model.parameters():
        assert param.grad is None or param.grad.shape == param.shape
    model.zero_grad(set_to_none=False)
    model.zero_grad()


def nothing(model: nn.Module) -> None: ...


def train(
    rank: int, world_size: int, stage: int, work: Callable[[nn.Module], None], every: int = 1
) -> tuple[list[torch.Tensor], list[str]]:
    told = messages()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    engine = sgd_engine(model, stage=stage, accumulation=2)
    generator = torch.Generator().manual_seed(rank)
    for micro in range(2 * 3):
        engine.backward(engine(torch.randn(3, 4, generator=generator)).square().mean())
        if micro % every == every - 1:
            work(model)
        engine.step()
        assert all(param.grad is None for param in model.parameters()) or engine.global_steps == 0
    with zero.GatheredParameters(model.parameters()):
        weights = [param.detach().clone() for param in model.parameters()]
    return weights, [text for text in told if "has no effect" in text]


# Each in a process of its own, which is told once.
@pytest.mark.parametrize("work", [clips_norm, clamps_the_largest, replaces, clears])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_work_on_gradients_is_told_once_and_has_no_effect(rank, world_size, stage, work):
    (expected, nothing_said), (weights, texts) = [
        train(rank, world_size, stage, each) for each in (nothing, work)
    ]
    assert all(map(torch.equal, weights, expected)) and nothing_said == []
    if work is clears:
        assert texts == []
    else:
        (text,) = texts
        assert "`gradient_clipping` in the configuration" in text


@pytest.mark.parametrize("every", [2, 4])
def test_work_at_the_end_of_a_step_is_told(every):
    """Not in the first micro-batch, and not in the first step."""
    for _, texts in run_on(2, train, 3, clips_norm, every):
        assert len(texts) == 1


def hooked(rank: int, world_size: int, steps: int) -> list[str]:
    told = messages()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model[1].weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(0.1))
    sgd_engine(model, accumulation=steps)
    return [text for text in told if "register_post_accumulate_grad_hook" in text]


def test_a_hook_that_sees_no_sum_is_named():
    assert run_on(1, hooked, 1) == [[]]
    (texts,) = run_on(1, hooked, 3)
    assert len(texts) == 1 and texts[0].startswith("1.weight")
