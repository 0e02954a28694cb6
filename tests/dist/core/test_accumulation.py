"""Two ways to end an accumulation by hand:

`managed_gradient_accumulation: false` and `coalesce_grad_reduction`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import assert_close_to, noise, sgd_engine
from tests.processes import on_ranks
from zero.errors import UsageError

WIDTH, ROWS, STEPS = 8, 4, [2, 4, 1]
TERMS = 4 * WIDTH + 4 * ROWS


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def engine_of(stage: int, **keys: object) -> zero.ZeroEngine:
    return sgd_engine(model(), stage=stage, overlap_comm=stage >= 2, **keys)


def inputs(rank: int, step: int, part: int) -> torch.Tensor:
    return noise(10 * step + part, rank, ROWS, WIDTH)


def expected(world_size: int) -> nn.Module:
    """Train in plain torch. The loss of a step is the mean over the micro-batches of all ranks."""
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, parts in enumerate(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            for part in range(parts):
                (plain(inputs(rank, step, part)).square().mean() / parts / world_size).backward()
        optimizer.step()
    return plain


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_step_of_the_script_ends_the_accumulation(rank, world_size, stage):
    engine = engine_of(stage, managed_gradient_accumulation=False, gradient_accumulation_steps=4)
    for step, parts in enumerate(STEPS):
        for part in range(parts):
            loss = engine(inputs(rank, step, part)).square().mean() / parts
            engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        assert engine.was_step_applied() and engine.global_steps == step + 1
    assert engine.global_samples == sum(STEPS) * world_size
    assert_close_to(engine.module, expected(world_size), TERMS, len(STEPS))
    with pytest.raises(UsageError, match="set_gradient_accumulation_boundary"):
        engine.set_gradient_accumulation_boundary(True)
    with (
        pytest.raises(UsageError, match="coalesce_grad_reduction"),
        engine.coalesce_grad_reduction(),
    ):
        pass


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_gradients_of_several_backwards_are_reduced_together(rank, world_size, stage):
    engine = engine_of(stage)
    for step, parts in enumerate(STEPS):
        with engine.coalesce_grad_reduction():
            for part in range(parts):
                engine.backward(engine(inputs(rank, step, part)).square().mean() / parts)
                assert all(param.grad is None for param in engine.module.parameters())
        assert engine.comm.calls["reduce_scatter"] == len(engine.groups) * (step + 1)
        engine.step()
    assert_close_to(engine.module, expected(world_size), TERMS, len(STEPS))


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_gradient_can_be_read_between_coalesced_and_other_backwards(rank, world_size, stage):
    """Read a gradient after two backwards that were coalesced, and a third one; one more is to
    come.
    """
    engine = engine_of(stage, gradient_accumulation_steps=4)
    with engine.coalesce_grad_reduction():
        for part in (0, 1):
            engine.backward(engine(inputs(rank, 0, part)).square().mean())
    engine.backward(engine(inputs(rank, 0, 2)).square().mean())
    plain = model()
    for each in range(world_size):
        for part in range(3):
            (plain(inputs(each, 0, part)).square().mean() / 4 / world_size).backward()
    found = zero.fragments.safe_get_full_grad(engine.module[0].weight)
    torch.testing.assert_close(found, plain[0].weight.grad)


@on_ranks(1)
def test_what_coalescing_does_not_go_with(rank, world_size):
    engine = engine_of(1)
    with engine.coalesce_grad_reduction(), pytest.raises(UsageError, match="no_sync"):
        engine.step()
    with (
        engine.no_sync(),
        pytest.raises(UsageError, match="nested"),
        engine.coalesce_grad_reduction(),
    ):
        pass
    with pytest.raises(NotImplementedError), engine_of(0).coalesce_grad_reduction():
        pass
    with pytest.raises(UsageError, match="overlap_comm only with ZeRO stage 2"):
        sgd_engine(model(), stage=1, overlap_comm=True, managed_gradient_accumulation=False)
