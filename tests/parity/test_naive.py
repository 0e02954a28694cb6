"""The engine against `naive.py`: losses and weights are equal bit for bit, norms within
rounding.
"""

import pytest
import torch

from tests.dist.training import (
    Curve,
    adamw,
    assert_same_training,
    curve_on,
    ds_config,
    split,
    start,
    train_zero,
    weights_of,
)
from tests.parity.models import batches, build
from tests.parity.naive import NaiveZero3

STEPS = 5


def naive(rank: int, world_size: int, name: str, accumulation: int) -> Curve:
    engine, curve = NaiveZero3(build(name), lambda shards: adamw([{"params": shards}])), Curve()
    for batch in batches(name, STEPS):
        losses, norm = engine.step(split(batch, world_size * accumulation)[rank::world_size])
        curve.losses.append(losses)
        curve.norms.append(norm)
    assert not any(param.numel() for param in engine.params)
    engine.unshard()
    curve.weights = weights_of(engine.model)
    return curve


def sharded(rank: int, world_size: int, name: str, accumulation: int) -> Curve:
    settings = ds_config(accumulation=accumulation, stage3_param_persistence_threshold=0)
    engine, _ = start(build(name), settings)
    return train_zero(engine, batches(name, STEPS))


@pytest.mark.parametrize(
    ("name", "world_size", "accumulation"), [("t5", 1, 2), ("gpt2", 2, 1), ("llama", 3, 2)]
)
def test_the_engine_computes_what_the_naive_one_does(name: str, world_size: int, accumulation: int):
    found = curve_on(world_size, sharded, name, accumulation)
    assert_same_training(found, curve_on(world_size, naive, name, accumulation))
    assert found.losses[0] != found.losses[-1] and torch.tensor(found.norms).isfinite().all()
