"""A parameter without a gradient in a step, on any rank, stays as it is in that step: as in plain
torch, it has neither momentum, weight decay nor a step of its own. The hunt compares this with
plain torch; here are state that is not kept in fp32, checkpoints, and what ranks exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import ds_config
from tests.processes import run_on
from tests.tolerance import rounding
from zero.comm.control import Control
from zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_optimizer_state,
)

WIDTH, ROWS, STEPS, MICRO = 40, 4, 7, 2
TERMS = 400
# With which step each part is trained: by the step, the parts of even and of odd micro-batches of
# all ranks. Part 1 begins late, part 2 pauses, and part 3 is used by the last rank alone.
USES: Sequence[tuple[set[int], set[int]]] = (
    ({0, 2}, {0}),
    ({0, 1}, {2}),
    ({0}, {0}),
    (set(), set()),
    ({1, 3}, {1}),
    ({0, 2}, {3}),
    ({0, 1, 2, 3}, {0}),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor, used: set[int]) -> torch.Tensor:
        for number in sorted(used):
            inputs = inputs + self.parts[number](inputs).tanh()
        return self.out(inputs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, inputs: torch.Tensor, used: set[int]) -> torch.Tensor:
        inputs = inputs.to(self.blocks[0].out.weight.dtype)
        for block in self.blocks:
            inputs = block(inputs, used)
        return inputs.square().mean()


def loss(model: Callable, step: int, micro: int, rank: int, ranks: int) -> torch.Tensor:
    seed = 100 * step + 10 * micro + rank
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(inputs, USES[step][micro] - ({3} if rank < ranks - 1 else set()))


def engine_of(section: dict) -> zero.ZeroEngine:
    model = Net()
    config = ds_config(stage3_param_persistence_threshold=0, **section)
    config["gradient_accumulation_steps"] = MICRO
    return zero.initialize(model=model, optimizer=ADAMW(model.parameters()), config=config)[0]


def train(engine: zero.ZeroEngine, rank: int, ranks: int, steps: range = range(STEPS)) -> None:
    for step in steps:
        for micro in range(MICRO):
            engine.backward(loss(engine, step, micro, rank, ranks))
            engine.step()


def masters(engine: zero.ZeroEngine) -> dict[str, torch.Tensor]:
    named = engine.module.named_parameters()
    return {name: value for name, p in named if (value := safe_get_full_fp32_param(p)) is not None}


def is_close(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    difference = (found - expected).abs().max().item()
    # Adam divides by roots of second moments, which are small here.
    assert difference <= 50 * rounding(torch.float32, TERMS, STEPS), (what, difference)


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
CPU = {"offload_optimizer": {"device": "cpu"}}
WHOLE = {"elementwise_optimizer": False}


def kept(rank: int, world_size: int) -> None:
    """Nothing of an unused part changes in a step: also with coded moments and rounded masters."""
    codes = {"zero_quantized_moments": True}
    narrow = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    for section in ({**codes}, {**codes, **CPU}, {**codes, "stage": 1}, {"bf16": narrow}):
        engine = engine_of(section)
        for step in range(STEPS):
            params = dict(engine.module.named_parameters())
            keys = ("exp_avg", "exp_avg_sq")

            def state(params: dict = params, keys: tuple = keys) -> dict:
                found = {n: safe_get_full_fp32_param(p) for n, p in params.items()}
                for key in keys:
                    for name, param in params.items():
                        found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key)
                return found

            before = state()
            train(engine, rank, world_size, range(step, step + 1))
            used = set().union(*USES[step])
            for name, value in state().items():
                idle = ".parts." in name and int(name.split(".")[3]) not in used
                former = before[name]
                same = value is former if None in (value, former) else torch.equal(value, former)
                if idle:
                    assert same, (section, step, name)
                elif "weight" in name and step:
                    assert not same, (section, step, name)
        engine.destroy()


def test_nothing_of_an_unused_parameter_changes():
    run_on(2, kept)


def resumed(rank: int, world_size: int, folder: str) -> None:
    for section in ({"stage": 3}, {"stage": 1, "zero_quantized_moments": True}, WHOLE):
        first = engine_of(section)
        train(first, rank, world_size, range(1))
        late = first.module.get_parameter("blocks.0.parts.1.weight")
        # A rank without a part of it has nothing to write.
        if section == {"stage": 3} and safe_get_local_fp32_param(late).numel():
            with pytest.raises(
                ValueError, match=r"'blocks.0.parts.1.weight' has no .*exp_avg' yet"
            ):
                safe_set_full_optimizer_state(late, torch.ones(WIDTH, WIDTH), "exp_avg")
        train(first, rank, world_size, range(1, 5))
        first.save_checkpoint(folder)
        train(first, rank, world_size, range(5, STEPS))
        expected = masters(first)
        first.destroy()
        second = engine_of(section)
        second.load_checkpoint(folder)
        train(second, rank, world_size, range(5, STEPS))
        for name, value in masters(second).items():
            assert torch.equal(value, expected[name]), (section, name)
        second.destroy()
    engine = engine_of({"stage": 2, "sub_group_size": 1000})
    train(engine, rank, world_size, range(5))
    engine.save_checkpoint(folder)


def moved(rank: int, world_size: int, folder: str, ranks: int) -> dict[str, torch.Tensor]:
    """Load what `ranks` ranks have saved, and train on with its last rank's batches only."""
    engine = engine_of({"stage": 3})
    engine.load_checkpoint(folder)
    for step in range(5, STEPS):
        for micro in range(MICRO):
            engine.backward(loss(engine, step, micro, ranks - 1, ranks))
            engine.step()
    return masters(engine)


def test_checkpoints_have_the_counts_of_each_parameter(tmp_path):
    run_on(2, resumed, str(tmp_path))
    alone, three = (run_on(size, moved, str(tmp_path), 2)[0] for size in (1, 3))
    for name, value in alone.items():
        is_close(three[name], value, name)


def exchanges(rank: int, world_size: int) -> list[int]:
    """How many lists travel in each step, in which one part is never used and another is later."""
    engine: Any
    model = Net()
    config = ds_config(stage=2, optimizer={"type": "AdamW"})
    engine, *_ = zero.initialize(model=model, config=config)
    exchange, counts = Control.exchange, []
    with mock.patch.object(Control, "exchange", autospec=True, side_effect=exchange) as called:
        for used in ({0}, {0}, {0}, {0, 1 + rank}, {0, 1 + rank}, {0, 1, 2}):
            before = called.call_count
            engine.backward(engine(torch.ones(ROWS, WIDTH), used))
            engine.step()
            counts.append(called.call_count - before)
    return counts


def test_lists_travel_only_if_something_has_changed():
    for counts in run_on(2, exchanges):
        assert counts == [1, 0, 0, 1, 0, 1]
