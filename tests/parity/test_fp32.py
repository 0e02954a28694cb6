"""fp32: the engine against plain torch in one process, steps of AdamW on the same global batches.

The reference runs the same micro-batches, one after another, and adds their gradients in the same
order. So losses and weights are equal bit for bit on any CPU. With clipping the reference divides
by the engine's norms, which equal its own within rounding (`assert_same_training`). A separate test
compares the reference with training on whole batches. These are equal within rounding only, because
products of other shapes round differently."""

import pytest
import torch

from tests.dist.training import (
    LR,
    WEIGHT_DECAY,
    Curve,
    assert_equal,
    curve_on,
    ds_config,
    relative,
    train_in_slices,
    train_plain,
)
from tests.parity.models import VOCABULARY, assert_bits, batches, build, sharded
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


@pytest.mark.parametrize(("name", "ranks", "accumulation"), CASES)
def test_losses_and_weights_with_clipping_are_bit_for_bit_those_of_slices(
    name, ranks, accumulation
):
    config = ds_config(clip=1.0, accumulation=accumulation, **SMALL)
    assert_bits(ranks, name, batches(name, STEPS), config)


def plain(rank: int, world_size: int, name: str) -> Curve:
    return train_plain(build(name), batches(name, STEPS))


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}}}
OFFLOADED = ADAMW | {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("t5", {}), ("gpt2", {}), ("llama", {}), ("llama", ADAMW), ("t5", OFFLOADED)],
)
def test_a_world_of_one_is_a_plain_loop_bit_for_bit(name, settings):
    """The norms too, because no parameter is cut; and with the configured optimizer."""
    config = ds_config(**SMALL, **settings)
    found = curve_on(1, sharded, name, batches(name, STEPS), config, {})
    assert_equal(found, curve_on(1, plain, name))
