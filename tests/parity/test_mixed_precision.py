"""Every stage in fp32, bf16 and fp16 with fp32 masters, against the same computation in plain
torch.

Losses and weights are equal bit for bit on any CPU. Both compute gradients of the same
micro-batches in equal shapes, scale the losses alike (in fp16 a scale changes subnormal gradients),
add gradients in fp32 in the same order (at stages 0 and 1 a rank sums its micro-batches, and ranks
exchange the sums; at stages 2 and 3 they exchange each micro-batch's gradients), and take one AdamW
step in fp32. Only norms may differ by fp32 rounding: the squares of a parameter on several ranks
are summed in parts. So with clipping the reference divides by the engine's norms."""

from functools import partial

import pytest
import torch

import zero
from tests.dist.training import ds_config
from tests.parity.models import assert_bits, batches
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


def look(engine: zero.ZeroEngine, dtypes: set[torch.dtype]) -> None:
    assert {param.dtype for param in engine.module.parameters()} == dtypes
    assert all(each.master.dtype == torch.float32 for each in engine.optimizer.sub_groups)


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


CASES += [
    (name, 3, dtype, 1, 1, CLIP) for name in ("t5", "llama", "deepseek") for dtype in SECTIONS
]


@pytest.mark.parametrize(("name", "stage", "dtype", "ranks", "accumulation", "clip"), CASES)
def test_stages_and_ranks_are_bit_for_bit(name, stage, dtype, ranks, accumulation, clip):
    sections = SECTIONS.get(dtype, {}) | SMALL | {"stage": stage}
    config = ds_config(clip=clip, accumulation=accumulation, **sections)
    dtypes = {dtype, torch.float32} if name == "deepseek" else {dtype}
    scale = SCALE if dtype == torch.float16 else 1.0
    looks = partial(look, dtypes=dtypes)
    assert_bits(ranks, name, batches(name, STEPS), config, looks, dtype=dtype, scale=scale)
