"""Hybrid sharding against plain torch in one process: the same bits, as sums have the same order there.

Sharded over groups of k ranks, gradients are summed within each group, and then over the groups. The reference adds them
in this order. Norms are those of the same gradients, within rounding.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.dist.training import (
    Curve,
    adamw,
    assert_same_training,
    curve_on,
    ds_config,
    relative,
    start,
    together,
    train_in_slices,
    train_plain,
    train_zero,
)
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import run_on
from zero.offload import tiers

STEPS, ACCUMULATION, CLIP = 3, 3, 0.5
HOST = {"device": "cpu"}
LATE = {"offload_optimizer": HOST | {"overlap_step": True}}
Cases = dict[str, dict[str, Any]]
CASES: Cases = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "host memory, late updates": {"offload_param": HOST, **LATE},
    "files": {"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
}
OPTIMIZERS = {"AdamW": adamw, "torch's Adafactor": partial(torch.optim.Adafactor, lr=1e-2)}


def sharded(rank: int, world_size: int, name: str, folder: str, size: int, optimizer: str, cases: Cases) -> list[Curve]:
    tiers.LEAST_BYTES_IN_A_FILE = 1
    return [_one(name, folder, size, optimizer, case) for case in cases.values()]


def _one(name: str, folder: str, size: int, optimizer: str, case: dict[str, Any]) -> Curve:
    case = {key: value | {"nvme_path": folder} if "offload" in key else value for key, value in case.items()}
    config = ds_config(clip=CLIP, accumulation=ACCUMULATION, mics_shard_size=size, **SMALL | case)
    engine, _ = start(build(name), config, make=OPTIMIZERS[optimizer])
    assert engine.comm.shard_group.size == size and engine.comm.replicate_group.size * size == engine.comm.world_size
    curve = train_zero(engine, batches(name, STEPS))
    held = sum(shard.master.numel() for shard in engine.optimizer.shards.values())
    whole = sum(unit.layout.padded for unit in engine.units)
    assert held == (whole if case.get("stage") == 0 else whole // size), "of the masters, by elements"
    engine.destroy()
    return curve


@cache
def reference(name: str, ranks: int, size: int, own_first: bool, optimizer: str, norms: tuple[float, ...]) -> Curve:
    return curve_on(1, plain, name, ranks, size, own_first, optimizer, norms)


def plain(
    rank: int, world_size: int, name: str, ranks: int, size: int, own_first: bool, optimizer: str, norms: tuple
) -> Curve:
    order = {"own_first": own_first, "shard_size": size, "make": OPTIMIZERS[optimizer]}
    return train_in_slices(build(name), batches(name, STEPS), ranks, ACCUMULATION, clip=CLIP, norms=norms, **order)


@pytest.mark.parametrize(
    ("name", "ranks", "size", "optimizer", "cases"),
    [
        ("t5", 4, 2, "AdamW", CASES),
        ("llama", 4, 2, "AdamW", {"stage 3": {}}),
        ("llama", 4, 2, "torch's Adafactor", {"stage 2": {"stage": 2}, "stage 3": {}}),
        ("llama", 2, 1, "AdamW", {each: CASES[each] for each in ("stage 2", "stage 3", "host memory, late updates")}),
    ],
)
def test_shards_over_groups_train_bit_for_bit_as_plain_torch(tmp_path, name, ranks, size, optimizer, cases):
    of_ranks = run_on(ranks, sharded, name, str(tmp_path), size, optimizer, cases)
    for (label, case), curves in zip(cases.items(), zip(*of_ranks, strict=True), strict=True):
        found = together(curves)
        assert min(found.norms) > CLIP, "clipping must be at work"
        own_first = case.get("stage", 3) < 2
        assert_same_training(found, reference(name, ranks, size, own_first, optimizer, tuple(found.norms)))
