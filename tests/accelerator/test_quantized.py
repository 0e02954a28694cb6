"""Quantized weights on the simulated accelerator: no mistake is found, bits do not change, and the
losses are the CPU's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

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


def trained_experts(rank: int, world_size: int, place: str) -> list[float]:
    """The losses of adapters of experts in 4 bits, whose scales are quantized too."""
    from peft import LoraConfig, get_peft_model
    from transformers import MixtralConfig, MixtralForCausalLM

    from zero.integrations.hf.quantized_experts import QuantizedExperts

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=64, **sizes, **heads))
    for layer in model.model.layers:
        for name, param in layer.mlp.experts.named_parameters():
            packed = QuantizedExperts.of(param.data, "nf4", True)
            setattr(layer.mlp.experts, name, nn.Parameter(packed, requires_grad=False))
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_parameters=targets)).to(place)
    params = [param for param in model.parameters() if param.requires_grad]
    engine = zero.initialize(model=model, model_parameters=params, config=config())[0]
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, 64, (2, 16), generator=generator).to(place)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_experts_in_4_bits_have_the_losses_of_gloo() -> None:
    pytest.importorskip("bitsandbytes")
    found = run_on(2, trained_experts, device.NAME, simulated=True)
    assert found == [pytest.approx(each, rel=1e-6) for each in run_on(2, trained_experts, "cpu")]
