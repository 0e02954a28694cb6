"""Param groups whose optimizer state has different names, such as SGD with momentum for matrices
only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import ds_config, start, train_zero, trainable
from tests.processes import on_ranks
from zero.fragments import (
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
)

# The option that the group of matrices has, and the state that only this group has.
KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "SGD": (partial(torch.optim.SGD, lr=0.01), {"momentum": 0.9}, "momentum_buffer"),
    "AdamW": (partial(torch.optim.AdamW, lr=0.01), {"amsgrad": True}, "max_exp_avg_sq"),
    "Adagrad": (partial(torch.optim.Adagrad, lr=0.01), {"lr": 0.02}, ""),
    # One tensor at a time, and with a product that it keeps as a number of its own.
    "NAdam": (partial(torch.optim.NAdam, lr=0.01, foreach=False), {"lr": 0.02}, ""),
}


def engine_of(name: str) -> zero.ZeroEngine:
    make, option, _ = KINDS[name]

    def grouping(named):
        matrices = [param for _, param in named if param.dim() > 1]
        vectors = [param for _, param in named if param.dim() <= 1]
        return [{"params": matrices} | option, {"params": vectors}]

    config = ds_config(stage3_param_persistence_threshold=0, sub_group_size=50)
    return start(toy(), config, grouping, make)[0]


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@on_ranks(3)
def test_states_of_one_group_are_read_on_all_ranks(rank, world_size, name):
    engine, key = engine_of(name), KINDS[name][2]
    weights = dict(trainable(engine.module))
    assert all(safe_get_full_optimizer_state(param, key) is None for param in weights.values())
    train_zero(engine, toy_batches(1))
    for param in weights.values():
        full = safe_get_full_optimizer_state(param, key)
        part = safe_get_local_optimizer_state(param, key)
        if len(param.ds_shape) > 1:
            assert full.shape == param.ds_shape and full.any()
            assert part.shape == param.ds_tensor.shape
        else:
            assert full is None
            assert part is None or not part.numel()  # empty: this rank has no part of the parameter


@pytest.mark.parametrize("name", KINDS)
@on_ranks(2)
def test_a_checkpoint_holds_the_states_that_each_group_has(rank, world_size, name, tmp_path):
    batches, losses = toy_batches(4), []
    for saves in (True, False):
        engine = engine_of(name)
        if saves:
            train_zero(engine, batches[:2])
            engine.save_checkpoint(tmp_path)
        else:
            engine.load_checkpoint(tmp_path)
        losses.append(train_zero(engine, batches[2:]).losses)
    assert losses[0] == losses[1]
