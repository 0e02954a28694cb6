"""Every stage in fp32, bf16 and fp16 with fp32 masters, against the same computation in plain
torch.

Losses and weights are equal bit for bit on any CPU. Both compute gradients of the same
micro-batches in equal shapes, scale the losses alike (in fp16 a scale changes subnormal gradients),
add gradients in fp32 in the same order (at stages 0 and 1 a rank sums its micro-batches, and ranks
exchange the sums; at stages 2 and 3 they exchange each micro-batch's gradients), and take one AdamW
step in fp32. Only norms may differ by fp32 rounding: the squares of a parameter on several ranks
are summed in parts. So with clipping the reference divides by the engine's norms."""

from typing import Any

import pytest
import torch

from tests.dist.training import (
    Curve,
    assert_equal,
    assert_same_training,
    curve_on,
    ds_config,
    start,
    train_zero,
)
from tests.parity.models import batches, build, in_slices
from tests.parity.test_fp32 import SMALL

STEPS = 3
SCALE = 1024.0
# Below the norm of every step, so that each one is clipped.
CLIP = 0.5
SECTIONS = {
    torch.bfloat16: {"bf16": {"enabled": True}},
    torch.float16: {"fp16": {"enabled": True, "loss_scale": SCALE}},
}
DTYPES = [torch.float32, *SECTIONS]


def options(dtype: torch.dtype, **others: Any) -> dict[str, Any]:
    return {"dtype": dtype, "scale": SCALE if dtype == torch.float16 else 1.0, **others}


def sharded(
    rank: int,
    world_size: int,
    name: str,
    stage: int,
    dtype: torch.dtype,
    accumulation: int,
    clip: float,
) -> Curve:
    keys = {"stage": stage, **SECTIONS.get(dtype, {}), **SMALL}
    engine, _ = start(build(name), ds_config(clip=clip, accumulation=accumulation, **keys))
    dtypes = {param.dtype for param in engine.module.parameters()}
    assert dtypes == ({dtype, torch.float32} if name == "deepseek" else {dtype})
    assert all(sub_group.master.dtype == torch.float32 for sub_group in engine.optimizer.sub_groups)
    return train_zero(engine, batches(name, STEPS))


@pytest.mark.parametrize("dtype", SECTIONS, ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["t5", "llama", "deepseek"])
def test_world_of_one_is_bit_for_bit(name, dtype):
    """The norms too, because no parameter is cut."""
    expected = curve_on(1, in_slices, name, STEPS, 1, 1, options(dtype, clip=CLIP))
    assert max(expected.norms) > CLIP, "clipping must be at work"
    assert_equal(curve_on(1, sharded, name, 3, dtype, 1, CLIP), expected)


# (model, stage, dtype, ranks, accumulation, clipping): each stage in each dtype with one of two
# models, in turn, with accumulation and clipping; each stage without; and other numbers of ranks.
CASES = [
    (["t5", "llama"][(stage + number) % 2], stage, dtype, 2, 2, CLIP)
    for stage in range(4)
    for number, dtype in enumerate(DTYPES)
]
CASES += [("t5", stage, DTYPES[stage % 3], 2, 1, 0.0) for stage in range(4)]
CASES += [
    (*case[:2], dtype, *case[2:], 0.0)
    for dtype in SECTIONS
    for case in (("t5", 3, 3, 1), ("t5", 3, 1, 4), ("deepseek", 3, 2, 2))
]


@pytest.mark.parametrize(("name", "stage", "dtype", "ranks", "accumulation", "clip"), CASES)
def test_stages_and_ranks_are_bit_for_bit(name, stage, dtype, ranks, accumulation, clip):
    found = curve_on(ranks, sharded, name, stage, dtype, accumulation, clip)
    assert min(found.norms) > clip, "clipping must be at work in every step"
    others = {"norms": found.norms if clip else None, "own_first": stage < 2 and accumulation > 1}
    given = name, STEPS, ranks, accumulation, options(dtype, clip=clip, **others)
    assert_same_training(found, curve_on(1, in_slices, *given))
