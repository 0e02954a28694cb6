"""Offload changes where numbers are, and never the numbers: steps give the same bits from memory
and from files.

This holds on any CPU, because all runs have the same shapes. (Without a C++ compiler, torch's fused
Adam updates offloaded state. Its last bits depend on where a sub-group begins.)

Here tensors of any size may go to a file, and sub-groups are cut at odd places. With two ranks,
parameters are really gathered."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.dist.training import Curve, assert_equal, curve_on, ds_config, start, train_zero
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.parity.test_mixed_precision import SECTIONS
from zero.offload import tiers
from zero.optim import adam_cpu

STEPS = {torch.float32: 5, torch.bfloat16: 4}
BOTH = {"pipeline_read": True, "pipeline_write": True}


def offloaded(
    rank: int, world_size: int, folder: str, dtype: torch.dtype, keys: dict[str, Any]
) -> Curve:
    tiers.LEAST_BYTES_IN_A_FILE = 1
    sections = SECTIONS.get(dtype, {}) | SMALL | {"sub_group_size": 20000} | keys
    for name in ("offload_param", "offload_optimizer"):
        if name in keys:
            sections[name] = {"nvme_path": folder} | keys[name]
    engine, _ = start(build("t5"), ds_config(clip=0.5, **sections))
    param, optimizer = (keys.get(f"offload_{name}", {}) for name in ("param", "optimizer"))
    in_file = param.get("device") == "nvme" and param.get("max_in_cpu", 0) == 0
    for group in engine.groups:
        assert group.tier.holds_in_file(group.shard) == (in_file and not group.persistent)
    found = train_zero(engine, batches("t5", STEPS[dtype]))
    spilled = [
        each.shard.tier.holds_in_file(engine.optimizer.state[each.master]["exp_avg"])
        for each in engine.optimizer.sub_groups
    ]
    share = optimizer.get("ratio", 1.0) if optimizer.get("device") == "nvme" else 0.0
    assert any(spilled) == (share > 0) and all(spilled) == (share == 1)
    return found


@cache
def in_memory(world_size: int, dtype: torch.dtype) -> Curve:
    return curve_on(world_size, offloaded, "", dtype, {})


NVME = {"device": "nvme", "max_in_cpu": 0}
CPU, FILES = {"device": "cpu"}, {"device": "nvme"}
LATE = CPU | {"overlap_step": True}
HALF = FILES | BOTH | {"ratio": 0.5}
# The parameters' section, the optimizer's, and other keys.
CASES = {
    "cpu": (CPU, CPU, {}),
    "cpu, late update": (CPU, LATE, {}),
    "optimizer in files": (None, FILES, {}),
    "parameters in files": (NVME, CPU, {}),
    "all in files": (NVME, FILES | {"overlap_step": False}, {}),
    "all in files, late update": (NVME, FILES | BOTH, {}),
    "half of it": (NVME, HALF, {"sub_group_size": 10**6}),
    "odd sub-groups": (NVME, FILES | BOTH, {"sub_group_size": 7777}),
    "some in memory": (FILES | {"max_in_cpu": 10**6}, FILES, {}),
}


def keys_of(param: dict | None, optimizer: dict | None, others: dict | None = None) -> dict:
    sections = {"offload_param": param, "offload_optimizer": optimizer}
    return {name: each for name, each in sections.items() if each} | (others or {})


# All cases on one rank in fp32, and on two ranks in bf16. One on two ranks in fp32.
RUNS = [(*run, case) for run in ((1, torch.float32), (2, torch.bfloat16)) for case in CASES]
RUNS += [(2, torch.float32, "odd sub-groups")]


@pytest.mark.skipif(not adam_cpu.is_compiled(), reason="torch's fused Adam has other last bits")
@pytest.mark.parametrize("world_size, dtype, case", RUNS)
def test_same_bits(tmp_path, world_size, dtype, case):
    found = curve_on(world_size, offloaded, str(tmp_path), dtype, keys_of(*CASES[case]))
    assert_equal(found, in_memory(world_size, dtype))
    assert not list(tmp_path.iterdir()), "the files were unlinked at creation"
