"""Hybrid sharding on the simulated accelerator: no mistake is found, and the bits are those of
plain torch.

Collectives there divide before they add: by two, which keeps bits. A micro-batch's gradients are
summed over all ranks before they are added to those of others. `first` is what the reference sums
first, by the number of gradients."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch

from tests.accelerator.test_engine import OFFLOADS, data_on_device, model_on_device
from tests.dist.training import (
    Curve,
    adamw,
    assert_same_training,
    curve_on,
    ds_config,
    start,
    train_in_slices,
    train_zero,
)
from tests.parity.test_fp32 import SMALL
from tests.parity.test_whole_tensor import MAKE

STEPS = 3
OPTIMIZERS = MAKE | {"AdamW": adamw}


def sharded(
    rank: int, world_size: int, optimizer: str, accumulation: int, section: dict[str, Any]
) -> Curve:
    os.environ["LOCAL_RANK"] = str(rank % torch.accelerator.device_count())
    config = ds_config(accumulation=accumulation, **SMALL | section)
    engine, _ = start(model_on_device(), config, make=OPTIMIZERS[optimizer])
    curve = train_zero(engine, data_on_device()[:STEPS])
    replicas = engine.comm.replicate_group.size
    assert (
        (engine.comm.calls["reduce_replicas"] > 0)
        == (replicas > 1)
        == ("mics_shard_size" in section)
    )
    engine.destroy()
    return curve


def plain(
    rank: int, world_size: int, optimizer: str, ranks: int, accumulation: int, first: int
) -> Curve:
    order = {"shard_size": first, "make": OPTIMIZERS[optimizer]}
    curve = train_in_slices(
        model_on_device(), data_on_device()[:STEPS], ranks, accumulation, **order
    )
    curve.weights = {name: value.cpu() for name, value in curve.weights.items()}
    return curve


@cache
def expected(*args: Any) -> Curve:
    return curve_on(1, plain, *args, simulated=True)


HOST = OFFLOADS["parameters"]


@pytest.mark.parametrize(
    ("optimizer", "ranks", "accumulation", "first", "section"),
    [
        ("AdamW", 4, 1, 2, {"mics_shard_size": 2}),
        ("torch's Adafactor", 4, 1, 2, {"mics_shard_size": 2, "stage": 2}),
        ("AdamW", 2, 3, 2, {"mics_shard_size": 1, **HOST}),
        ("AdamW", 4, 3, 4, {"zero_hpz_partition_size": 2, **HOST}),
    ],
    ids=str,
)
def test_groups_of_ranks_train_as_plain_torch_does(optimizer, ranks, accumulation, first, section):
    found = curve_on(ranks, sharded, optimizer, accumulation, section, simulated=True)
    assert_same_training(found, expected(optimizer, ranks, accumulation, first))
