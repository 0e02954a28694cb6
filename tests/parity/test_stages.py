"""Every stage in every dtype on two ranks: losses and weights of plain torch in one process, bit
for bit on any CPU.

The reference has the same shapes and the same order of sums. At stages 0 and 1 a rank sums its
micro-batches, and ranks exchange the sums. At stages 2 and 3 they exchange each micro-batch's
gradients. Clipping divides by the norm. It may differ by fp32 rounding, because the squares of a
parameter on two ranks are summed in parts. So with clipping the reference takes the engine's norms.
"""

from functools import cache

import pytest
import torch

from tests.dist.training import (
    Curve,
    assert_same_training,
    curve_on,
    ds_config,
    start,
    train_in_slices,
    train_zero,
)
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.parity.test_mixed_precision import SCALE, SECTIONS

STEPS, RANKS = 3, 2
# Below the norm of every step, so that each one is clipped.
CLIP = 0.5

STAGES = [0, 1, 2, 3]
DTYPES = [torch.float32, *SECTIONS]
MODELS = ["t5", "llama"]


def plain(
    rank: int,
    world_size: int,
    name: str,
    dtype: torch.dtype,
    accumulation: int,
    clip: float,
    norms: tuple,
    own_first: bool,
) -> Curve:
    scale = SCALE if dtype == torch.float16 else 1.0
    settings = {
        "dtype": dtype,
        "scale": scale,
        "clip": clip,
        "norms": norms or None,
        "own_first": own_first,
    }
    return train_in_slices(build(name), batches(name, STEPS), RANKS, accumulation, **settings)


@cache
def reference(*args: object) -> Curve:
    return curve_on(1, plain, *args)


def staged(
    rank: int,
    world_size: int,
    name: str,
    stage: int,
    dtype: torch.dtype,
    accumulation: int,
    clip: float,
) -> Curve:
    sections = SECTIONS.get(dtype, {})
    engine, _ = start(
        build(name),
        ds_config(stage=stage, accumulation=accumulation, clip=clip, **sections, **SMALL),
    )
    assert {param.dtype for param in engine.module.parameters()} == {dtype}
    return train_zero(engine, batches(name, STEPS))


# Each stage in each dtype with one of the models, in turn.
@pytest.mark.parametrize(
    ("stage", "name", "dtype"),
    [
        (stage, MODELS[(stage + number) % 2], dtype)
        for stage in STAGES
        for number, dtype in enumerate(DTYPES)
    ],
)
def test_with_accumulation_and_clipping_bit_for_bit(stage, name, dtype):
    found = curve_on(RANKS, staged, name, stage, dtype, 2, CLIP)
    assert min(found.norms) > CLIP, "clipping must be at work in every step"
    assert_same_training(found, reference(name, dtype, 2, CLIP, tuple(found.norms), stage < 2))


@pytest.mark.parametrize(("stage", "dtype"), [*zip(STAGES, [*DTYPES, torch.float32], strict=True)])
def test_without_accumulation_and_clipping_bit_for_bit(stage, dtype):
    """All stages give the same."""
    assert_same_training(
        curve_on(RANKS, staged, "t5", stage, dtype, 1, 0.0),
        reference("t5", dtype, 1, 0.0, (), False),
    )
