"""bf16 and fp16 with fp32 masters, against the same computation in plain torch.

Losses and weights are equal bit for bit on any CPU. Both compute gradients of the same
micro-batches in equal shapes, scale the losses alike (in fp16 a scale changes subnormal gradients),
add gradients in fp32 in the same order, and take one AdamW step in fp32. Only norms may differ by
fp32 rounding: the squares of a parameter on several ranks are summed in parts. `test_stages` has
the other stages, and clipping on several ranks."""

import pytest
import torch

from tests.dist.training import (
    Curve,
    assert_equal,
    assert_same_training,
    curve_on,
    ds_config,
    start,
    train_in_slices,
    train_zero,
)
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL

STEPS = 5
SCALE = 1024.0
CLIP = 0.5
SECTIONS = {
    torch.bfloat16: {"bf16": {"enabled": True}},
    torch.float16: {"fp16": {"enabled": True, "loss_scale": SCALE}},
}
DTYPES = pytest.mark.parametrize("dtype", list(SECTIONS), ids=["bf16", "fp16"])


def reference(
    rank: int,
    world_size: int,
    name: str,
    dtype: torch.dtype,
    ranks: int,
    accumulation: int,
    clip: float,
) -> Curve:
    scale = SCALE if dtype == torch.float16 else 1.0
    return train_in_slices(
        build(name), batches(name, STEPS), ranks, accumulation, dtype=dtype, scale=scale, clip=clip
    )


def sharded(
    rank: int, world_size: int, name: str, dtype: torch.dtype, accumulation: int, clip: float
) -> Curve:
    config = ds_config(clip=clip, accumulation=accumulation, **SECTIONS[dtype], **SMALL)
    engine, _ = start(build(name), config)
    dtypes = {param.dtype for param in engine.module.parameters()}
    assert dtypes == ({dtype, torch.float32} if name == "deepseek" else {dtype})
    assert all(sub_group.master.dtype == torch.float32 for sub_group in engine.optimizer.sub_groups)
    return train_zero(engine, batches(name, STEPS))


@DTYPES
@pytest.mark.parametrize("name", ["t5", "llama", "deepseek"])
def test_world_of_one_is_bit_for_bit(name, dtype):
    expected = curve_on(1, reference, name, dtype, 1, 1, CLIP)
    assert max(expected.norms) > CLIP, "clipping must be at work"
    assert_equal(curve_on(1, sharded, name, dtype, 1, CLIP), expected)


@DTYPES
@pytest.mark.parametrize(
    ("name", "world_size", "accumulation"), [("t5", 3, 1), ("t5", 1, 4), ("deepseek", 2, 2)]
)
def test_ranks_and_accumulation_are_bit_for_bit(dtype, name, world_size, accumulation):
    expected = curve_on(1, reference, name, dtype, world_size, accumulation, 0.0)
    assert_same_training(curve_on(world_size, sharded, name, dtype, accumulation, 0.0), expected)
