"""Compressed communication by the device's own collectives: no mistake is found, and the numbers
are gloo's.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.accelerator import device
from tests.dist.comm.test_compression import FOUR_BITS, GRADIENTS, WEIGHTS, WHOLE, data, model
from tests.dist.training import Curve, assert_equal, curve_on, ds_config, start, train_zero

HOST = {"offload_param": {"device": "cpu"}, "stage3_max_reuse_distance": 0}


def trained(rank: int, world_size: int, settings: dict) -> Curve:
    engine, _ = start(model(), ds_config(**WHOLE, **settings))
    curve = train_zero(engine, data(4))
    curve.weights = {name: value.cpu() for name, value in curve.weights.items()}
    engine.destroy()
    return curve


def trained_on_device(rank: int, world_size: int, settings: dict) -> Curve:
    found = trained(rank, world_size, settings)
    assert torch.accelerator.current_accelerator().type == device.NAME
    return found


def trained_on_machines(rank: int, world_size: int, settings: dict) -> Curve:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return trained(rank, world_size, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {**WEIGHTS, **GRADIENTS, **HOST},
        {**WEIGHTS, **FOUR_BITS, "accumulation": 2, "clip": 0.05},
        {**GRADIENTS, "stage": 0},
    ],
    ids=["parameters in host memory", "4 bits", "stage 0"],
)
def test_training_has_the_bits_of_gloo(settings):
    """Of two ranks: their mean is half of the sum, which no rounding changes."""
    assert_equal(
        curve_on(2, trained_on_device, settings, simulated=True), curve_on(2, trained, settings)
    )


def test_two_machines_have_the_bits_of_gloo():
    """The ranks of a machine sum first, beside the compute stream. Of four ranks: as above."""
    settings = {**GRADIENTS, "accumulation": 2, "clip": 0.05}
    found = curve_on(4, trained_on_machines, settings, simulated=True)
    assert_equal(found, curve_on(4, trained_on_machines, settings))
    assert found.losses != curve_on(4, trained, settings, simulated=True).losses
