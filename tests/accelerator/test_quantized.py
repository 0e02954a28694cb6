"""Quantized weights on the simulated accelerator: no mistake is found, bits do not change, and the
losses are the CPU's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zero
from tests.accelerator import device
from tests.dist.core.test_quantized_weights import (
    Aliased,
    Buffered,
    Codes,
    Model,
    Plain,
    Wide,
    config,
    steps,
)
from tests.processes import run_on


class Floats8(Codes):
    """Without complex numbers, whose parts the simulated device cannot show."""

    def __init__(self) -> None:
        super().__init__()
        del self.phases

    def matrix(self) -> torch.Tensor:
        return self.weight.float() * self.weight_scale_inv * self.factor.float()


def trained(rank: int, world_size: int, place: str, folder: Path) -> list[list[float]]:
    """The losses with each tier. Each forward compares all bytes."""
    return [
        losses(
            place,
            config(offload_param={"device": tier, "nvme_path": str(folder), "max_in_cpu": 0}),
        )
        for tier in ("none", "cpu", "nvme")
    ]


def losses(place: str, settings: dict) -> list[float]:
    model = Model([Wide, Floats8, Aliased, Buffered]).to(place)
    model.layers[2].base.holder.codes = model.layers[2].base.weight.data
    for layer in model.layers:
        layer.made = Plain({name: value.to(place) for name, value in layer.made.items()})
    params = [param for param in model.parameters() if param.requires_grad]
    engine = zero.initialize(model=model, model_parameters=params, config=settings)[0]
    return steps(engine, place=place)


def test_quantized_weights_have_the_bits_and_losses_of_gloo(tmp_path: Path) -> None:
    [found, _] = run_on(2, trained, device.NAME, tmp_path, simulated=True)
    [expected, _] = run_on(2, trained, "cpu", tmp_path)
    assert found == [pytest.approx(each, rel=1e-6) for each in expected]
