"""The engine's interface: ways to make an engine and to step it, and what it refuses."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import (
    LR,
    adamw,
    assert_same_weights,
    ds_config,
    start,
    step,
    train_zero,
)
from tests.processes import on_ranks, run_on

CONFIG = ds_config(stage3_param_persistence_threshold=30)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)


@pytest.mark.parametrize("given_as", ["object", "function"])
@on_ranks(2)
def test_a_users_scheduler_acts_on_the_steps(rank, world_size, given_as):
    model = toy()
    optimizer = adamw([{"params": list(model.parameters())}])
    scheduler = halving if given_as == "function" else halving(optimizer)
    engine, returned, _, lr_scheduler = zero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config_params=CONFIG
    )
    rates = []
    for batch in toy_batches(3):
        rates.append(returned.param_groups[0]["lr"])
        step(engine, [batch])
    assert lr_scheduler.get_last_lr() == [returned.param_groups[0]["lr"]]
    assert rates == [LR, LR / 2, LR / 4]


@on_ranks(2)
def test_a_model_can_be_given_to_another_engine(rank, world_size):
    """A model keeps its values when its engine is destroyed."""
    model = toy()
    engine, _ = start(model, CONFIG)
    step(engine, toy_batches(1))
    before = engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    again, _ = start(model, CONFIG)
    after = again._zero3_consolidated_16bit_state_dict()
    if rank == 0:
        assert_same_weights(after, before)
    step(again, toy_batches(1))
    assert again.get_global_grad_norm() > 0


class Measuring(torch.optim.SGD):
    """Keeps a number in its param groups that depends on the gradients, as Prodigy does."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["d"] = sum(
                float(param.grad.norm()) for param in group["params"] if param.grad is not None
            )


def measured(told: bool | None) -> None:
    model = toy()
    optimizer = Measuring(model.parameters(), lr=0.1)
    engine, *_ = zero.initialize(
        model=model, optimizer=optimizer, config=ds_config(elementwise_optimizer=told)
    )
    step(engine, toy_batches(1))


# What an error says, and the call that raises it.
REFUSED: dict[str, Callable[[zero.ZeroEngine], Any]] = {
    "model is missing": lambda engine: zero.initialize(config=CONFIG),
    "config is missing": lambda engine: zero.initialize(model=toy()),
    "mpu": lambda engine: zero.initialize(model=toy(), mpu=object(), config=CONFIG),
    "configuration": lambda engine: engine.half(),
    "torch.bfloat16": lambda engine: engine.to(torch.bfloat16),
    "meta": lambda engine: engine.to("meta"),
    "scalar tensor": lambda engine: engine.backward(torch.ones(2)),
    "optimizer": lambda engine: zero.initialize(model=toy().requires_grad_(False), config=CONFIG)[
        0
    ].step(),
    "which tensors this rank has (param group 0, d: ": lambda engine: measured(None),
    "Measuring changes 'd' of its param group": lambda engine: measured(True),
}


def refusals(rank: int, world_size: int) -> None:
    engine, _ = start(toy(), CONFIG)
    for says, call in REFUSED.items():
        with pytest.raises(ValueError, match=re.escape(says)):
            call(engine)
    assert engine.to("cpu") is engine.float() is engine.to(torch.float32) is engine


def test_what_is_refused_says_what_to_do():
    run_on(2, refusals)


@on_ranks(2)
def test_an_engine_goes_with_its_last_reference(rank, world_size):
    threads = []
    for _ in range(3):
        engine = start(toy(), CONFIG)[0]
        train_zero(engine, toy_batches(1))
        engine = weakref.ref(engine)
        while engine() is not None and gc.collect():
            pass  # the Python object of a tensor may need one more collection
        threads.append(threading.active_count())
    assert engine() is None and threads[-1] == threads[0]
