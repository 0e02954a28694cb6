"""Offload changes where numbers are, and never the numbers: steps give the same bits from memory
and from files.

This holds on any CPU, because all runs have the same shapes. Without a C++ compiler, torch's fused
Adam updates offloaded state. Its last bits depend on where a sub-group begins. Then the run in
memory uses it too, on the same sub-groups.

Here tensors of any size may go to a file, and sub-groups are cut at odd places. With two ranks,
parameters are really gathered."""

from functools import cache, partial

import pytest
import torch

from tests.dist.training import (
    LR,
    WEIGHT_DECAY,
    Curve,
    Make,
    adamw,
    assert_equal,
    curve_on,
    ds_config,
    start,
    train_zero,
)
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.parity.test_mixed_precision import SECTIONS
from zero.offload import tiers
from zero.optim import adam_cpu

STEPS = {torch.float32: 5, torch.bfloat16: 4}
BOTH = {"pipeline_read": True, "pipeline_write": True}


def offloaded(
    rank: int,
    world_size: int,
    folder: str,
    dtype: torch.dtype,
    param: dict,
    optimizer: dict,
    others: dict,
    make: Make = adamw,
) -> Curve:
    tiers.LEAST_BYTES_IN_A_FILE = 1
    sections = {**SECTIONS.get(dtype, {}), **SMALL, "sub_group_size": 20000, **others}
    for name, section in (("offload_param", param), ("offload_optimizer", optimizer)):
        if section:
            sections[name] = {"nvme_path": folder, **section}
    engine, _ = start(build("t5"), ds_config(clip=0.5, **sections), make=make)
    for group in engine.groups:
        in_file = param.get("device") == "nvme" and not group.persistent
        assert group.tier.holds_in_file(group.shard) == (
            in_file and param.get("max_in_cpu", 0) == 0
        )
    found = train_zero(engine, batches("t5", STEPS[dtype]))
    state = engine.optimizer.state
    spilled = [
        sub_group.shard.tier.holds_in_file(state[sub_group.master]["exp_avg"])
        for sub_group in engine.optimizer.sub_groups
    ]
    share = optimizer.get("ratio", 1.0) if optimizer.get("device") == "nvme" else 0.0
    assert any(spilled) == (share > 0) and all(spilled) == (share == 1)
    return found


def by_offloads_adam(rank: int, world_size: int, dtype: torch.dtype, others: dict) -> Curve:
    """In memory, by torch's fused step, which offloaded Adam takes without a compiler."""
    fused = partial(torch.optim.AdamW, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    return offloaded(rank, world_size, "", dtype, {}, {}, others, fused)


@cache
def in_memory(world_size: int, dtype: torch.dtype) -> Curve:
    return curve_on(world_size, offloaded, "", dtype, {}, {}, {})


NVME = {"device": "nvme", "max_in_cpu": 0}
CASES = {
    "cpu": ({"device": "cpu"}, {"device": "cpu"}, {}),
    "cpu, late update": ({"device": "cpu"}, {"device": "cpu", "overlap_step": True}, {}),
    "optimizer in files": ({}, {"device": "nvme"}, {}),
    "parameters in files": (NVME, {"device": "cpu"}, {}),
    "all in files": (NVME, {"device": "nvme", "overlap_step": False}, {}),
    "all in files, late update": (NVME, {"device": "nvme", **BOTH}, {}),
    "half of it": (NVME, {"device": "nvme", "ratio": 0.5, **BOTH}, {"sub_group_size": 10**6}),
    "odd sub-groups": (NVME, {"device": "nvme", **BOTH}, {"sub_group_size": 7777}),
    "some in memory": ({"device": "nvme", "max_in_cpu": 10**6}, {"device": "nvme"}, {}),
}


# All cases on one rank in fp32, and on two ranks in bf16. One on two ranks in fp32.
RUNS = [(*run, case) for run in ((1, torch.float32), (2, torch.bfloat16)) for case in CASES]
RUNS += [(2, torch.float32, "odd sub-groups")]


@pytest.mark.parametrize("world_size, dtype, case", RUNS)
def test_same_bits(tmp_path, world_size, dtype, case):
    param, optimizer, others = CASES[case]
    found = curve_on(world_size, offloaded, str(tmp_path), dtype, param, optimizer, others)
    if optimizer["device"] == "nvme" and not adam_cpu.is_compiled():
        assert_equal(found, curve_on(world_size, by_offloads_adam, dtype, others))
    else:
        assert_equal(found, in_memory(world_size, dtype))
    assert not list(tmp_path.iterdir()), "the files were unlinked at creation"
