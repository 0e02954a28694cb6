"""fp32: the engine against plain torch in one process, 20 steps of AdamW on the same global batches."""

from functools import cache

import pytest

import zero
from tests.dist.training import (
    LR,
    WEIGHT_DECAY,
    Curve,
    assert_close,
    assert_equal,
    curve_on,
    ds_config,
    relative,
    start,
    train_in_slices,
    train_plain,
    train_zero,
)
from tests.parity.models import batches, build

STEPS = 20
# Small enough that every mechanism is at work on models of 20-40 thousand elements.
SMALL = {
    "stage3_param_persistence_threshold": 40,
    "stage3_prefetch_bucket_size": 4000,
    "stage3_max_live_parameters": 25000,
    "stage3_max_reuse_distance": 9000,
    "sub_group_size": 1000,
    "reduce_bucket_size": 3000,
}


def plain(rank: int, world_size: int, name: str, clip: float) -> Curve:
    return train_plain(build(name), batches(name, STEPS), clip)


def slices(rank: int, world_size: int, name: str, count: int) -> Curve:
    return train_in_slices(build(name), batches(name, STEPS), count)


def sharded(rank: int, world_size: int, name: str, clip: float, accumulation: int) -> Curve:
    engine, _ = start(build(name), ds_config(clip=clip, accumulation=accumulation, **SMALL))
    return train_zero(engine, batches(name, STEPS))


@cache
def reference(name: str, clip: float) -> Curve:
    return curve_on(1, plain, name, clip)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["t5", "gpt2", "llama"])
def test_losses_and_norms_with_clipping(name, world_size):
    expected = reference(name, 1.0)
    assert max(expected.norms) > 1.0, "clipping must be at work"
    assert_close(curve_on(world_size, sharded, name, 1.0, 1), expected)


@pytest.mark.parametrize("name", ["t5", "gpt2", "llama"])
def test_world_of_one_without_clipping_is_bit_for_bit(name):
    assert_equal(curve_on(1, sharded, name, 0.0, 1), reference(name, 0.0))


@pytest.mark.parametrize(("name", "world_size"), [("t5", 2), ("llama", 3), ("gpt2", 4)])
def test_every_micro_batch_is_bit_for_bit_what_summing_slices_gives(name, world_size):
    """The norm is not: a parameter that lies on two ranks has its squares summed in two parts."""
    found, expected = curve_on(world_size, sharded, name, 0.0, 1), curve_on(1, slices, name, world_size)
    assert found.losses == expected.losses
    assert relative(found.norms, expected.norms) <= 1e-6


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (3, 2)])
def test_accumulation_and_ranks_are_interchangeable(world_size, accumulation):
    assert_close(curve_on(world_size, sharded, "t5", 1.0, accumulation), reference("t5", 1.0))


def configured(rank: int, world_size: int, name: str, settings: dict) -> Curve:
    section = {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}}
    engine, *_ = zero.initialize(model=build(name), config=ds_config(optimizer=section, **SMALL, **settings))
    return train_zero(engine, batches(name, STEPS))


def test_the_configured_optimizer_is_torchs_default():
    assert_equal(curve_on(1, configured, "llama", {}), reference("llama", 0.0))


def test_the_configured_optimizer_has_the_same_bits_where_its_state_is_offloaded():
    offload = {"offload_optimizer": {"device": "cpu"}}
    assert_equal(curve_on(1, configured, "t5", offload), curve_on(1, plain, "t5", 0.0))


def test_one_rank_accumulating_four_equals_four_ranks_without():
    """Even bit for bit: both add the same four gradients in the same order."""
    assert curve_on(1, sharded, "t5", 0.0, 4).losses == curve_on(4, sharded, "t5", 0.0, 1).losses
