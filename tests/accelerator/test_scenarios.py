"""What `tests/dist` and `tests/parity` do on gloo, on the simulated accelerator: no mistake is
found, and the numbers are the CPU's or those of plain torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.accelerator import device
from tests.dist.comm.test_compression import FOUR_BITS, GRADIENTS, WEIGHTS, WHOLE, data, model
from tests.dist.core import test_quantized_weights as quantized
from tests.dist.optim import test_moments as coded
from tests.dist.optim import test_schedule_free as free
from tests.dist.optim import test_without_masters as bf16
from tests.dist.training import (
    assert_equal,
    assert_same_weights,
    curve_on,
    ds_config,
    relative,
    train_plain,
)
from tests.parity import test_experts as experts
from tests.parity import test_experts_stay as experts_stay
from tests.parity import test_hybrid as hybrid
from tests.parity import test_pipeline as pipeline
from tests.parity import test_sequence as sequence
from tests.parity import test_tensor_parallel as tensor
from tests.parity.models import batches, sharded
from tests.processes import run_on
from zero.offload import activations


def on_own_device(rank: int, world_size: int, train: Callable, *args: Any) -> Any:
    activations.MIN_BYTES = 1
    found = train(rank, world_size, *args)
    used = [torch.accelerator.max_memory_allocated(number) > 0 for number in range(2)]
    assert used == [number == rank % 2 for number in range(2)]
    return found


# -- compressed communication by the device's own collectives, groups of ranks, experts in slices

HOST = {"offload_param": {"device": "cpu"}}
EACH_USE = HOST | {"stage3_max_reuse_distance": 0}


def on_machines(size: int) -> nn.Module:
    """So many ranks of a machine sum first, beside the compute stream."""
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    return model()


def is_sliced(engine: zero.ZeroEngine) -> None:
    assert len(engine._sliced) == 2


SUMS = {"accumulation": 2, "clip": 0.05}
GROUPS = hybrid.SMALL | {"accumulation": hybrid.ACCUMULATION, "clip": hybrid.CLIP}
MIXTRAL = partial(experts.build, "mixtral", "eager")
SLICED = experts.NOTHING_PERSISTS | {"stage3_max_live_parameters": experts.EXPERTS_NUMEL // 2}
# Ranks, a model, keys and how. The mean of two or of four is a part of a sum, which no rounding
# changes: where gradients are coded, their sums have the bits of gloo.
CASES: dict[str, tuple[int, Any, dict, dict]] = {
    "codes of weights": (2, model, {**WHOLE, **WEIGHTS, **GRADIENTS, **EACH_USE}, {}),
    "codes of 4 bits": (2, model, {**WHOLE, **WEIGHTS, **FOUR_BITS, **SUMS}, {}),
    "codes at stage 0": (2, model, {**WHOLE, **GRADIENTS, "stage": 0}, {}),
    "codes of machines": (4, partial(on_machines, 2), {**WHOLE, **GRADIENTS, **SUMS}, {}),
    "MiCS": (4, "llama", GROUPS | {"mics_shard_size": 2}, {}),
    "MiCS, whole tensors": (
        4,
        "llama",
        GROUPS | {"mics_shard_size": 2, "stage": 2},
        {"make": hybrid.OPTIMIZERS["torch's Adafactor"]},
    ),
    "MiCS on the host": (2, "llama", GROUPS | HOST | {"mics_shard_size": 1}, {}),
    "hpZ": (4, "llama", GROUPS | EACH_USE | hybrid.SECOND, {}),
    "experts in slices": (2, MIXTRAL, SLICED | HOST, {"look": is_sliced}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_gloo(case):
    ranks, made, keys, how = CASES[case]
    given = made, data(4) if "codes" in case else batches("llama", 3), ds_config(**keys), how
    found = curve_on(ranks, on_own_device, sharded, *given, simulated=True)
    expected = curve_on(ranks, sharded, *given)
    if "codes" in case:
        assert_equal(found, expected)
    assert relative(found.mean_losses(), expected.mean_losses()) < 1e-6
    assert relative(found.norms, expected.norms) < 1e-6


# -- quantized weights


class Floats8(quantized.Codes):
    """Without complex numbers, whose parts the simulated device cannot show."""

    def __init__(self) -> None:
        super().__init__()
        del self.phases

    def matrix(self) -> torch.Tensor:
        return self.weight.float() * self.weight_scale_inv * self.factor.float()


FORMATS = [quantized.Wide, Floats8, quantized.Aliased, quantized.Buffered]


def with_quantized(rank: int, world_size: int, folder: str) -> list[list[float]]:
    """The losses with each tier. Each forward compares all bytes."""
    found = []
    for tier in ("none", "cpu", "nvme"):
        model = quantized.Model(FORMATS).to(device.NAME)
        model.layers[2].base.holder.codes = model.layers[2].base.weight.data
        for layer in model.layers:
            made = {name: value.to(device.NAME) for name, value in layer.made.items()}
            layer.made = quantized.Plain(made)
        params = [param for param in model.parameters() if param.requires_grad]
        offload = {"device": tier, "nvme_path": folder, "max_in_cpu": 0}
        config = quantized.config(offload_param=offload) | {"gradient_clipping": 1.0}
        engine = zero.initialize(model=model, model_parameters=params, config=config)[0]
        found.append(quantized.steps(engine, place=device.NAME))
    return found


def test_quantized_weights_have_their_bits_and_the_losses_of_plain_torch(tmp_path):
    generator = torch.Generator().manual_seed(1)
    inputs = [{"x": torch.randn(2, quantized.WIDTH, generator=generator)} for _ in range(3)]
    make = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
    plain = train_plain(quantized.Model(FORMATS), inputs, 1.0, make=make)
    [found, _] = run_on(2, with_quantized, str(tmp_path), simulated=True)
    assert found == [pytest.approx(plain.mean_losses(), abs=1e-6)] * 3


# -- bf16 without masters, schedule-free optimizers, 8-bit moments

WHERE = {
    "on the device": {},
    "offloaded": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


def on_the_device(ratio: float) -> dict[str, Any]:
    """All but this part of the state is on the device."""
    offload = {"device": "cpu", "ratio": ratio}
    return {"offload_optimizer": offload, "stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize(
    ("name", "states", "where"),
    [
        ("AdamW", True, WHERE["offloaded"]),
        ("Adafactor", False, WHERE["on the device"]),
        ("AdamW", True, on_the_device(0.5)),
    ],
)
def test_bf16_without_masters(name, states, where, tmp_path):
    given = bf16.trained, name, states, where
    found, expected = (
        run_on(ranks, *given, str(tmp_path / str(ranks)), simulated=True)[0] for ranks in (2, 1)
    )
    assert_same_weights(found, expected)


@pytest.mark.parametrize("where", WHERE)
def test_schedule_free(where, tmp_path):
    found = run_on(2, free.sharded, "AdamW", WHERE[where], str(tmp_path), simulated=True)[0]
    free.compare(found, "AdamW")


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_8_bit_moments_train_on_the_device_and_in_host_memory(ratio):
    sections = coded.CODED | on_the_device(ratio)
    given = 2, coded.trained, sections, 8
    assert relative(run_on(*given, simulated=True)[0][0], run_on(*given)[0][0]) < 1e-3


# -- parallel layers, pipelines, sequences


def test_layers_in_parts():
    """Activations, some of them `DTensor`s, go to the host."""
    section = {"activation_checkpointing": {"cpu_checkpointing": True}}
    cases = [("llama", tensor.NOTHING_PERSISTS | section), ("layers", {"stage": 1} | section)]
    tensor.compare(run_on(2, on_own_device, tensor.trained, cases, simulated=True), cases)


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
def test_experts_that_stay(ranks, size):
    cases = [("mixtral", "eager", size, {"stage": stage}) for stage in (0, 1, 2, 3)]
    of_ranks = run_on(ranks, on_own_device, experts_stay.trained, cases, simulated=True)
    for curves in zip(*of_ranks, strict=True):
        experts_stay.compare(experts_stay.together(curves), experts_stay.plain("mixtral"))


NAMES = ["Llama, tied, 1F1B, stage 3", "GPT, tied, interleaved, stage 3, offload"]


def test_pipelines(tmp_path):
    """Each stage is sharded over half of the ranks."""
    expected = run_on(1, pipeline.plain, NAMES)[0]
    for ranks in (2, 4):
        given = ranks, on_own_device, pipeline.piped, NAMES, str(tmp_path)
        pipeline.compare_all(run_on(*given, simulated=True), NAMES, expected)


def test_shared_sequences_are_those_of_one_process():
    case = sequence.Case(3, "sdpa")
    losses, norms = sequence.reference(2, case._replace(stage=0))
    for ((found_losses, found_norms),) in run_on(2, sequence.share, [case], simulated=True):
        assert relative(found_losses, [each for (each,) in losses]) < 1e-6
        assert relative(found_norms, norms) < 1e-6
