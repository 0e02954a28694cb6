"""fp32: the engine against plain torch in one process, steps of AdamW on the same global batches.

The reference runs the same micro-batches, one after another, and adds their gradients in the same
order. So losses and weights are equal bit for bit on any CPU. With clipping the reference divides
by the engine's norms, which equal its own within rounding (`assert_same_training`). A separate test
compares the reference with training on whole batches. These are equal within rounding only, because
products of other shapes round differently."""

from functools import cache

import pytest
import torch

import zero
from tests.dist.training import (
    LR,
    WEIGHT_DECAY,
    Curve,
    assert_equal,
    assert_same_training,
    curve_on,
    ds_config,
    relative,
    start,
    train_in_slices,
    train_plain,
    train_zero,
)
from tests.parity.models import VOCABULARY, batches, build, in_slices
from tests.processes import run_on
from tests.tolerance import rounding

STEPS = 10
# Limits so small that each one is reached by models of 20 to 40 thousand elements.
SMALL = {
    "stage3_param_persistence_threshold": 40,
    "stage3_prefetch_bucket_size": 4000,
    "stage3_max_live_parameters": 25000,
    "stage3_max_reuse_distance": 9000,
    "sub_group_size": 1000,
    "reduce_bucket_size": 3000,
}


def plain(rank: int, world_size: int, name: str) -> Curve:
    return train_plain(build(name), batches(name, STEPS))


def sharded(rank: int, world_size: int, name: str, clip: float, accumulation: int) -> Curve:
    engine, _ = start(build(name), ds_config(clip=clip, accumulation=accumulation, **SMALL))
    return train_zero(engine, batches(name, STEPS))


@cache
def reference(name: str) -> Curve:
    return curve_on(1, plain, name)


def both_ways(rank: int, world_size: int) -> list[Curve]:
    whole, sliced = build("gpt2").double(), build("gpt2").double()
    data = batches("gpt2", STEPS)
    return [train_plain(whole, data, 1.0), train_in_slices(sliced, data, 2, 3, clip=1.0)]


def test_slices_train_as_the_whole_batch_does():
    """In float64.

    But transformers computes the loss in fp32, with sums over the vocabulary and over tokens.
    """
    whole, sliced = run_on(1, both_ways)[0]
    assert max(whole.norms) > 1.0, "clipping must be at work"
    close = rounding(torch.float32, VOCABULARY + batches("gpt2", 1)[0]["labels"].numel(), STEPS)
    assert relative(sliced.mean_losses(), whole.mean_losses()) <= close
    assert relative(sliced.norms, whole.norms) <= close


# (model, ranks, accumulation)
CASES = [
    ("t5", 1, 4),
    ("t5", 2, 1),
    ("t5", 4, 1),
    ("gpt2", 1, 1),
    ("gpt2", 3, 1),
    ("llama", 2, 1),
    ("llama", 3, 2),
]


@pytest.mark.parametrize(("name", "world_size", "accumulation"), CASES)
def test_losses_and_weights_with_clipping_are_bit_for_bit_those_of_slices(
    name, world_size, accumulation
):
    found = curve_on(world_size, sharded, name, 1.0, accumulation)
    assert max(found.norms) > 1.0, "clipping must be at work"
    options = {"clip": 1.0, "norms": found.norms}
    given = name, STEPS, world_size, accumulation, options
    assert_same_training(found, curve_on(1, in_slices, *given))


@pytest.mark.parametrize("name", ["t5", "gpt2", "llama"])
def test_world_of_one_without_clipping_is_bit_for_bit(name):
    """The norms too, because no parameter is cut."""
    assert_equal(curve_on(1, sharded, name, 0.0, 1), reference(name))


def configured(rank: int, world_size: int, name: str, settings: dict) -> Curve:
    section = {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}}
    engine, *_ = zero.initialize(
        model=build(name), config=ds_config(optimizer=section, **SMALL, **settings)
    )
    return train_zero(engine, batches(name, STEPS))


def test_the_configured_optimizer_is_torchs_default():
    assert_equal(curve_on(1, configured, "llama", {}), reference("llama"))


def test_the_configured_optimizer_has_the_same_bits_where_its_state_is_offloaded():
    offload = {"offload_optimizer": {"device": "cpu"}}
    assert_equal(curve_on(1, configured, "t5", offload), reference("t5"))


def test_one_rank_accumulating_four_equals_four_ranks_without():
    """Bit for bit: both add the same four gradients in the same order, and division by 4 is exact
    in fp32.
    """
    assert curve_on(1, sharded, "t5", 0.0, 4).losses == curve_on(4, sharded, "t5", 0.0, 1).losses
