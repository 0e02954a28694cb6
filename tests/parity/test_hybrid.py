"""Hybrid sharding against plain torch in one process: the same bits, as sums have the same order
there.

Sharded over groups of k ranks, gradients are summed within each group, and then over the groups.
The reference adds them in this order. Norms are those of the same gradients, within rounding. The
loop that everybody knows, on whole batches, has other shapes and another order of sums: it is met
within 1e-6."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.dist.messages import counted_messages
from tests.dist.training import (
    Curve,
    adamw,
    assert_equal,
    assert_same_training,
    curve_on,
    ds_config,
    relative,
    split,
    start,
    step,
    together,
    train_plain,
    train_zero,
)
from tests.parity.models import batches, build, in_slices
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


def sharded(
    rank: int, world_size: int, name: str, folder: str, size: int, optimizer: str, cases: Cases
) -> list[Curve]:
    tiers.LEAST_BYTES_IN_A_FILE = 1
    return [_one(name, folder, size, optimizer, case) for case in cases.values()]


def _one(name: str, folder: str, size: int, optimizer: str, case: dict[str, Any]) -> Curve:
    case = {
        key: value | {"nvme_path": folder} if "offload" in key else value
        for key, value in case.items()
    }
    config = ds_config(clip=CLIP, accumulation=ACCUMULATION, mics_shard_size=size, **SMALL | case)
    engine, _ = start(build(name), config, make=OPTIMIZERS[optimizer])
    assert (
        engine.comm.shard_group.size == size
        and engine.comm.replicate_group.size * size == engine.comm.world_size
    )
    curve = train_zero(engine, batches(name, STEPS))
    held = sum(shard.master.numel() for shard in engine.optimizer.shards.values())
    whole = sum(group.layout.padded for group in engine.groups)
    assert held == (whole if case.get("stage") == 0 else whole // size), (
        "of the masters, by elements"
    )
    engine.destroy()
    return curve


@cache
def whole_batches(name: str, optimizer: str) -> Curve:
    return curve_on(1, plain_on_whole_batches, name, optimizer)


def plain_on_whole_batches(rank: int, world_size: int, name: str, optimizer: str) -> Curve:
    return train_plain(build(name), batches(name, STEPS), CLIP, make=OPTIMIZERS[optimizer])


@pytest.mark.parametrize(
    ("name", "ranks", "size", "optimizer", "cases"),
    [
        ("t5", 4, 2, "AdamW", CASES),
        ("llama", 4, 2, "AdamW", {"stage 3": {}}),
        ("llama", 4, 2, "torch's Adafactor", {"stage 2": {"stage": 2}, "stage 3": {}}),
        (
            "llama",
            2,
            1,
            "AdamW",
            {each: CASES[each] for each in ("stage 2", "stage 3", "host memory, late updates")},
        ),
    ],
)
def test_shards_over_groups_train_bit_for_bit_as_plain_torch(
    tmp_path, name, ranks, size, optimizer, cases
):
    of_ranks = run_on(ranks, sharded, name, str(tmp_path), size, optimizer, cases)
    for case, curves in zip(cases.values(), zip(*of_ranks, strict=True), strict=True):
        found = together(curves)
        assert min(found.norms) > CLIP, "clipping must be at work"
        expected = whole_batches(name, optimizer)
        assert relative(found.mean_losses(), expected.mean_losses()) < 1e-6
        assert relative(found.norms, expected.norms) < 1e-6
        order = {"own_first": case.get("stage", 3) < 2, "shard_size": size}
        order |= {"clip": CLIP, "norms": found.norms, "make": OPTIMIZERS[optimizer]}
        given = name, STEPS, ranks, ACCUMULATION, order
        assert_same_training(found, curve_on(1, in_slices, *given))


# -- second shards


WAYS: Cases = {
    "world": {},
    "hpZ": {"zero_hpz_partition_size": 2},
    "MiCS": {"mics_shard_size": 2},
}
EACH_USE = {"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0}


def count(
    rank: int, world_size: int, name: str, accumulation: int, sections: dict
) -> list[tuple[Curve, Counter, int]]:
    """For each way: the curve, elements that the second step gathers and sends to the other group,
    and the model's.
    """
    found = []
    for way in WAYS.values():
        engine, _ = start(
            build(name),
            ds_config(accumulation=accumulation, clip=CLIP, **EACH_USE, **way, **sections),
        )
        data, crossed = batches(name, STEPS), Counter()
        curve = train_zero(engine, data[:1])
        gathered = engine.comm.elements["all_gather"]
        parts = split(data[1], world_size * accumulation)[rank::world_size]
        with counted_messages() as sent:
            curve.losses.append(step(engine, parts))
        curve.norms.append(engine.get_global_grad_norm())
        crossed["gathered"] = engine.comm.elements["all_gather"] - gathered
        for (operation, peer), numel in sent.items():
            crossed[operation] += numel * (peer // 2 != rank // 2)
        whole = sum(group.layout.padded for group in engine.groups)
        last = train_zero(engine, data[2:])
        found.append(
            (
                Curve(curve.losses + last.losses, curve.norms + last.norms, last.weights),
                crossed,
                whole,
            )
        )
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("name", "accumulation", "sections"), [("llama", 1, {}), ("t5", 3, {"bf16": {"enabled": True}})]
)
def test_second_shards_keep_all_but_the_first_gather_within_a_group_and_change_no_bit(
    name, accumulation, sections
):
    of_ranks = run_on(4, count, name, accumulation, sections)
    curves = [together([curve for curve, *_ in of_way]) for of_way in zip(*of_ranks, strict=True)]
    assert_equal(curves[1], curves[0])
    for world, second, mics in of_ranks:
        crossed, whole = world[1], world[2]
        # A quarter of what is gathered goes to each of two ranks of the other group; with hpZ the
        # first time only.
        assert (
            crossed["all_gather"] == crossed["gathered"] // 2
            and second[1]["gathered"] == crossed["gathered"]
        )
        assert second[1]["all_gather"] == whole // 2
        # Each group is gathered in each forward and each backward, but for the embedding: its
        # backward needs no values.
        assert crossed["gathered"] == pytest.approx(2 * accumulation * whole, rel=0.07)
        assert (
            second[1]["reduce_scatter"]
            == crossed["reduce_scatter"]
            == accumulation * 2 * whole // 4
        )
        assert mics[1]["all_gather"] == mics[1]["reduce_scatter"] == 0
        assert mics[1]["reduce_replicas"] == accumulation * mics[2] // 2
