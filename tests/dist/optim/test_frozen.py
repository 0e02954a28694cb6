"""Parameters that are frozen after `initialize`: as in plain torch, they and their optimizer state
stay as they are until they are thawed. All ranks must freeze the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from tests.dist.toys import toy, toy_batches
from tests.dist.training import adamw, ds_config, loss_of, relative, split, start, step, weights_of
from tests.processes import run_on
from zero.fragments import safe_get_full_fp32_param, safe_get_full_optimizer_state

# All of one group, a vector in the middle of another one, and the last parameter of a third.
FROZEN = ("stem.weight", "blocks.1.up.bias", "blocks.3.down.bias")
STEPS, FREEZE, THAW = 6, 2, 4
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
WHOLE = {"elementwise_optimizer": False}


def freeze(model: nn.Module, number: int) -> None:
    """Before the step of this number: freeze, and thaw again."""
    for name, param in model.named_parameters():
        if name in FROZEN and number in (FREEZE, THAW):
            param.requires_grad_(number == THAW)


def plain(make: Callable) -> dict[str, torch.Tensor]:
    model = toy()
    optimizer = make(list(model.parameters()))
    for number, batch in enumerate(toy_batches(STEPS)):
        freeze(model, number)
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def values_of(model: nn.Module, key: str) -> dict[str, torch.Tensor]:
    """The masters and one state of each parameter."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = safe_get_full_fp32_param(param)
        found[f"{name}, {key}"] = safe_get_full_optimizer_state(param, key)
    return found


def trained(
    rank: int, world_size: int, make: Callable, key: str, sections: dict
) -> dict[str, torch.Tensor]:
    """The weights after `STEPS` steps. Between freezing and thawing nothing of what is frozen
    changes.
    """
    engine, _ = start(toy(), ds_config(**sections), make=make)
    after: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(toy_batches(STEPS)):
        freeze(engine.module, number)
        step(engine, split(batch, world_size)[rank : rank + 1])
        before, after = after, values_of(engine.module, key)
        former, weights = weights, engine._zero3_consolidated_16bit_state_dict() or {}
        frozen = FROZEN if FREEZE <= number < THAW else ()
        same = {name for name, value in before.items() if torch.equal(value, after[name])}
        if "zero_quantized_moments" in sections:  # codes share their scale with their neighbours
            same |= {
                name
                for name, value in before.items()
                if name.endswith(key)
                and torch.allclose(value, after[name], rtol=0.1, atol=0.01 * value.abs().max())
            }
        assert {name for name in before if name.split(",")[0] in frozen} <= same, number
        assert len(same) <= 2 * len(frozen) + 6, "others move (without masters, most of them)"
        for name in former.keys() & {*frozen}:
            assert torch.equal(weights[name], former[name]), (number, name)
    return weights


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("make", "key", "sections"),
    [
        (MOMENTUM, "momentum_buffer", {}),
        (MOMENTUM, "momentum_buffer", {"stage": 0}),
        (MOMENTUM, "momentum_buffer", WHOLE),
        (MOMENTUM, "momentum_buffer", {"sub_group_size": 50}),
    ],
)
def test_frozen_parameters_train_on_as_in_plain_torch(world_size, make, key, sections):
    found = run_on(world_size, trained, make, key, sections)[0]
    for name, expected in plain(make).items():
        difference = relative([(found[name] - expected).norm()], [expected.norm()])
        assert (found[name] - expected).norm() < 1e-5 * expected.norm(), (name, difference)


@pytest.mark.parametrize(
    "sections",
    [
        {"offload_optimizer": {"device": "cpu"}, "bf16": {"enabled": True}},
        {"zero_quantized_moments": True},
        {"zero_quantized_moments": True, "offload_optimizer": {"device": "cpu"}},
        {
            "bf16": {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
            }
        },
        WHOLE,
    ],
    ids=["offloaded", "codes", "codes offloaded", "without masters", "whole tensors"],
)
def test_nothing_of_a_frozen_parameter_changes(sections):
    run_on(2, trained, adamw, "exp_avg", sections)


def alone(rank: int, world_size: int, stage: int) -> str:
    """The last rank freezes a parameter that the others train."""
    engine, _ = start(toy(), ds_config(stage=stage))
    for number, batch in enumerate(toy_batches(2)):
        if number and rank == world_size - 1:
            engine.module.head.weight.requires_grad_(False)
        engine.backward(loss_of(engine(**batch)))
        if not number:
            engine.step()
    with pytest.raises(ValueError, match="the ranks disagree") as raised:
        engine.step()
    return str(raised.value)


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (3, 3)])
def test_a_rank_that_freezes_alone_is_named(stage, world_size):
    for message in run_on(world_size, alone, stage):
        assert f"frozen parameters: none on rank 0, head.weight on rank {world_size - 1}" in message


def saved(rank: int, world_size: int, folder: str, sections: dict) -> dict[str, torch.Tensor]:
    """The masters of a run in which `FROZEN` is frozen before the first step, so without a state
    of its own.
    """
    engine, _ = start(toy(), ds_config(**sections))
    freeze(engine.module, FREEZE)
    for batch in toy_batches(2):
        step(engine, split(batch, world_size)[rank : rank + 1])
    engine.save_checkpoint(folder)
    named = engine.module.named_parameters()
    return {name: safe_get_full_fp32_param(param) for name, param in named}


def loaded(rank: int, world_size: int, folder: str, sections: dict) -> dict[str, torch.Tensor]:
    engine, _ = start(toy(), ds_config(**sections))
    engine.load_checkpoint(folder)
    named = dict(engine.module.named_parameters())
    found = {name: safe_get_full_fp32_param(param) for name, param in named.items()}
    step(engine, split(toy_batches(3)[2], world_size)[rank : rank + 1])  # all are trained now
    for name, param in named.items():
        assert not torch.equal(safe_get_full_fp32_param(param), found[name]), name
    return found


@pytest.mark.parametrize("sections", [{}, WHOLE, {"sub_group_size": 50}])
def test_a_checkpoint_of_a_run_with_frozen_parameters_continues(sections, tmp_path):
    expected = run_on(2, saved, str(tmp_path), sections)[0]
    for world_size in (1, 2, 3):
        found = run_on(world_size, loaded, str(tmp_path), sections)[0]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
