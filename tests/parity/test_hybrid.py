"""Hybrid sharding against plain torch in one process: the same bits.

Sharded over groups of k ranks, gradients are summed within each group, and then over the groups.
The reference adds them in this order. `examples/hybrid_sharding.py` counts what crosses groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import zero
from tests.dist.training import Curve, adamw, ds_config, train_plain
from tests.parity import models
from tests.parity.models import assert_bits, batches
from tests.parity.test_fp32 import SMALL
from zero.offload import tiers

STEPS, ACCUMULATION, CLIP = 3, 3, 0.5
HOST, FILES = {"device": "cpu"}, {"device": "nvme"}
LATE = {"offload_param": HOST, "offload_optimizer": HOST | {"overlap_step": True}}
OPTIMIZERS = {"AdamW": adamw, "torch's Adafactor": partial(torch.optim.Adafactor, lr=1e-2)}
CASES = [
    *(("t5", 4, 2, "AdamW", {"stage": stage}) for stage in range(4)),
    ("t5", 4, 2, "AdamW", LATE),
    ("t5", 4, 2, "AdamW", {"offload_param": FILES, "offload_optimizer": FILES}),
    ("llama", 4, 2, "AdamW", {}),
    ("llama", 4, 2, "torch's Adafactor", {"stage": 2}),
    ("llama", 4, 2, "torch's Adafactor", {}),
    *(("llama", 2, 1, "AdamW", {"stage": stage}) for stage in (2, 3)),
    ("llama", 2, 1, "AdamW", LATE),
]


def build(name: str) -> Any:
    tiers.LEAST_BYTES_IN_A_FILE = 1
    return models.build(name)


def look(engine: zero.ZeroEngine, size: int) -> None:
    comm = engine.comm
    assert comm.shard_group.size == size and comm.replicate_group.size * size == comm.world_size
    held = sum(shard.master.numel() for shard in engine.optimizer.shards.values())
    whole = sum(group.layout.padded for group in engine.groups)
    assert held == whole // (1 if engine.settings.zero_optimization.stage == 0 else size)


@pytest.mark.parametrize(("name", "ranks", "size", "optimizer", "keys"), CASES)
def test_shards_over_groups_train_bit_for_bit_as_plain_torch(
    tmp_path, name, ranks, size, optimizer, keys
):
    keys = {
        key: value | {"nvme_path": str(tmp_path)} if "offload" in key else value
        for key, value in keys.items()
    }
    config = ds_config(clip=CLIP, accumulation=ACCUMULATION, **SMALL | keys, mics_shard_size=size)
    make, looks = OPTIMIZERS[optimizer], partial(look, size=size)
    assert_bits(ranks, partial(build, name), batches(name, STEPS), config, looks, make=make)


SECOND = {
    "zero_hpz_partition_size": 2,
    "stage3_max_live_parameters": 0,
    "stage3_param_persistence_threshold": 0,
}


@pytest.mark.parametrize(
    ("name", "accumulation", "sections", "dtype"),
    [("llama", 1, {}, None), ("t5", 3, {"bf16": {"enabled": True}}, torch.bfloat16)],
)
def test_second_shards_change_no_bit(name, accumulation, sections, dtype):
    config = ds_config(accumulation=accumulation, clip=CLIP, **SECOND, **sections)
    assert_bits(4, name, batches(name, STEPS), config, dtype=dtype)


def plain(rank: int, world_size: int, name: str, optimizer: str) -> Curve:
    return train_plain(models.build(name), batches(name, STEPS), CLIP, make=OPTIMIZERS[optimizer])
