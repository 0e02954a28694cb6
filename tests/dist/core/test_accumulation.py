"""Two ways to end an accumulation by hand:

`managed_gradient_accumulation: false` and `coalesce_grad_reduction`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import ds_config
from tests.processes import run_on
from zero.errors import UsageError

WIDTH, ROWS, STEPS = 8, 4, [2, 4, 1]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def engine_of(stage: int, **top: object) -> zero.ZeroEngine:
    trained = model()
    config = ds_config(stage3_param_persistence_threshold=0) | top
    config["zero_optimization"] |= {"stage": stage, "overlap_comm": stage >= 2}
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    return zero.initialize(model=trained, optimizer=optimizer, config=config)[0]


def inputs(rank: int, step: int, part: int) -> torch.Tensor:
    return torch.randn(
        ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * rank + 10 * step + part)
    )


def expected(world_size: int) -> list[torch.Tensor]:
    """Train in plain torch. The loss of a step is the mean over the micro-batches of all ranks."""
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, parts in enumerate(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            for part in range(parts):
                (plain(inputs(rank, step, part)).square().mean() / parts / world_size).backward()
        optimizer.step()
    return list(plain.parameters())


def values(engine: zero.ZeroEngine) -> list[torch.Tensor]:
    with zero.GatheredParameters(list(engine.parameters())):
        return [param.detach().clone() for param in engine.parameters()]


def unmanaged(rank: int, world_size: int, stage: int) -> None:
    engine = engine_of(stage, managed_gradient_accumulation=False, gradient_accumulation_steps=4)
    for step, parts in enumerate(STEPS):
        for part in range(parts):
            loss = engine(inputs(rank, step, part)).square().mean() / parts
            engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        assert engine.was_step_applied() and engine.global_steps == step + 1
    assert (
        engine.global_samples == sum(STEPS) * engine.train_micro_batch_size_per_gpu() * world_size
    )
    torch.testing.assert_close(values(engine), [param.detach() for param in expected(world_size)])
    with pytest.raises(UsageError, match="set_gradient_accumulation_boundary"):
        engine.set_gradient_accumulation_boundary(True)
    with (
        pytest.raises(UsageError, match="coalesce_grad_reduction"),
        engine.coalesce_grad_reduction(),
    ):
        pass


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_of_the_script_ends_the_accumulation(stage):
    run_on(2, unmanaged, stage)


def coalesced(rank: int, world_size: int, stage: int) -> None:
    engine = engine_of(stage)
    for step, parts in enumerate(STEPS):
        with engine.coalesce_grad_reduction():
            for part in range(parts):
                engine.backward(engine(inputs(rank, step, part)).square().mean() / parts)
                assert all(param.grad is None for param in engine.module.parameters())
        assert engine.comm.calls["reduce_scatter"] == len(engine.groups) * (step + 1)
        engine.step()
    torch.testing.assert_close(values(engine), [param.detach() for param in expected(world_size)])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_several_backwards_are_reduced_together(stage):
    run_on(2, coalesced, stage)


def read_between(rank: int, world_size: int, stage: int) -> None:
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_can_be_read_between_coalesced_and_other_backwards(stage):
    run_on(2, read_between, stage)


def test_what_coalescing_does_not_go_with():
    run_on(1, refused)


def refused(rank: int, world_size: int) -> None:
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
        zero.initialize(
            model=nn.Linear(2, 2),
            config={
                "train_batch_size": 1,
                "managed_gradient_accumulation": False,
                "zero_optimization": {"stage": 1, "overlap_comm": True},
            },
        )
