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

import zero
from tests.accelerator import device
from tests.dist.comm.test_compression import FOUR_BITS, GRADIENTS, WEIGHTS, WHOLE, data, model
from tests.dist.core import test_quantized_weights as quantized
from tests.dist.optim import test_moments as coded
from tests.dist.optim import test_schedule_free as free
from tests.dist.optim import test_without_masters as bf16
from tests.dist.training import (
    Curve,
    assert_equal,
    assert_same_weights,
    curve_on,
    ds_config,
    relative,
    start,
    step,
    together,
    train_plain,
    train_zero,
)
from tests.parity import test_experts as experts
from tests.parity import test_experts_stay as experts_stay
from tests.parity import test_hybrid as hybrid
from tests.parity import test_pipeline as pipeline
from tests.parity import test_sequence as sequence
from tests.parity import test_tensor_parallel as tensor
from tests.parity.models import batches, build
from tests.processes import run_on
from zero.offload import activations


def on_own_device(rank: int, world_size: int, train: Callable, *args: Any) -> Any:
    activations.MIN_BYTES = 1
    found = train(rank, world_size, *args)
    used = [torch.accelerator.max_memory_allocated(number) > 0 for number in range(2)]
    assert used == [number == rank % 2 for number in range(2)]
    return found


# -- compressed communication, by the device's own collectives

HOST = {"offload_param": {"device": "cpu"}, "stage3_max_reuse_distance": 0}


def compressed(rank: int, world_size: int, settings: dict, machine: int | None = None) -> Curve:
    """`machine`: how many ranks a machine has."""
    if machine is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(machine)
    engine, _ = start(model(), ds_config(**WHOLE, **settings))
    curve = train_zero(engine, data(4))
    curve.weights = {name: value.cpu() for name, value in curve.weights.items()}
    engine.destroy()
    return curve


@pytest.mark.parametrize(
    "settings",
    [
        {**WEIGHTS, **GRADIENTS, **HOST},
        {**WEIGHTS, **FOUR_BITS, "accumulation": 2, "clip": 0.05},
        {**GRADIENTS, "stage": 0},
    ],
    ids=["parameters in host memory", "4 bits", "stage 0"],
)
def test_compressed_training_has_the_bits_of_gloo(settings):
    """Of two ranks: their mean is half of the sum, which no rounding changes."""
    found = curve_on(2, on_own_device, compressed, settings, simulated=True)
    assert_equal(found, curve_on(2, compressed, settings))


def test_two_machines_have_the_bits_of_gloo():
    """The ranks of a machine sum first, beside the compute stream. Of four ranks: as above."""
    settings = {**GRADIENTS, "accumulation": 2, "clip": 0.05}
    found = curve_on(4, compressed, settings, 2, simulated=True)
    assert_equal(found, curve_on(4, compressed, settings, 2))
    assert found.losses != curve_on(4, compressed, settings, simulated=True).losses


# -- shards over groups of ranks


def with_second_shards(rank: int, world_size: int) -> Curve:
    keys = hybrid.WAYS["hpZ"] | hybrid.EACH_USE | HOST
    config = ds_config(clip=hybrid.CLIP, accumulation=hybrid.ACCUMULATION, **keys)
    return train_zero(start(build("llama"), config)[0], batches("llama", hybrid.STEPS))


@pytest.mark.parametrize(
    ("optimizer", "ranks", "size", "section"),
    [
        ("AdamW", 4, 2, {}),
        ("torch's Adafactor", 4, 2, {"stage": 2}),
        ("AdamW", 2, 1, {"offload_param": {"device": "cpu"}}),
        ("AdamW", 4, None, {}),
    ],
    ids=["MiCS", "whole tensors", "host", "hpZ"],
)
def test_groups_of_ranks(optimizer, ranks, size, section, tmp_path):
    given = hybrid.sharded, "llama", str(tmp_path), size, optimizer, {"": section}
    train = given if size else (with_second_shards,)
    of_ranks = run_on(ranks, on_own_device, *train, simulated=True)
    curve = together([found[0] if size else found for found in of_ranks])
    expected = hybrid.whole_batches("llama", optimizer)
    assert relative(curve.mean_losses(), expected.mean_losses()) < 1e-6
    assert relative(curve.norms, expected.norms) < 1e-6


# -- experts in slices


def sliced(rank: int, world_size: int, place: str) -> Curve:
    settings = {
        "stage3_max_live_parameters": experts.EXPERTS_NUMEL // 2,
        "offload_param": {"device": "cpu"},
    }
    mixtral = experts.build("mixtral", "eager").to(place)
    engine, _ = start(mixtral, ds_config(**experts.NOTHING_PERSISTS, **settings))
    assert len(engine._sliced) == 2 and engine.comm.device.type == place
    curve = train_zero(engine, experts.data())
    curve.weights = {}
    engine.destroy()
    return curve


def test_experts_in_slices_have_the_numbers_of_gloo():
    found, expected = curve_on(2, sliced, device.NAME, simulated=True), curve_on(2, sliced, "cpu")
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
    return {
        "offload_optimizer": {"device": "cpu", "ratio": ratio},
        "stage3_param_persistence_threshold": 0,
    }


@pytest.mark.parametrize(
    ("name", "states", "where"),
    [
        ("AdamW", True, WHERE["offloaded"]),
        ("Adafactor", False, WHERE["on the device"]),
        ("AdamW", True, on_the_device(0.5)),
    ],
)
def test_bf16_without_masters(name, states, where, tmp_path):
    found, expected = (
        run_on(
            ranks, bf16.trained, name, states, where, str(tmp_path / str(ranks)), simulated=True
        )[0]
        for ranks in (2, 1)
    )
    assert_same_weights(found, expected)


@pytest.mark.parametrize("where", WHERE)
def test_schedule_free(where, tmp_path):
    found = run_on(2, free.sharded, "AdamW", WHERE[where], str(tmp_path), simulated=True)[0]
    free.compare(found, "AdamW")


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_8_bit_moments_train_on_the_device_and_in_host_memory(ratio):
    sections = coded.CODED | on_the_device(ratio)
    expected, found = (
        run_on(2, coded.trained, sections, 8, simulated=simulated)[0] for simulated in (False, True)
    )
    assert relative(found[0], expected[0]) < 1e-3


# -- parallel layers, pipelines, sequences


def test_layers_in_parts():
    """Activations, some of them `DTensor`s, go to the host."""
    section = {"activation_checkpointing": {"cpu_checkpointing": True}}
    cases = [("llama", tensor.NOTHING_PERSISTS | section), ("layers", {"stage": 1} | section)]
    tensor.compare(run_on(2, on_own_device, tensor.trained, cases, simulated=True), cases)


def waits_of_a_step(rank: int, world_size: int) -> int:
    config = ds_config() | {"tensor_parallel": {"autotp_size": 2}}
    engine = tensor.start(tensor.build("llama"), config)
    batch = {
        name: value.to(engine.comm.device) for name, value in tensor.data_of("llama")[0].items()
    }
    step(engine, [batch])
    engine.backward(engine(**batch).loss)
    before = device.waits()
    engine.step()
    return device.waits() - before


def test_the_host_waits_for_the_norm_only():
    assert run_on(2, waits_of_a_step, simulated=True) == [1, 1]


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
def test_experts_that_stay(ranks, size):
    cases = [("mixtral", "eager", size, {"stage": stage}) for stage in (0, 1, 2, 3)]
    of_ranks = run_on(ranks, on_own_device, experts_stay.trained, cases, simulated=True)
    for curves in zip(*of_ranks, strict=True):
        experts_stay.compare(experts_stay.together(curves), experts_stay.plain("mixtral"))


NAMES = ["Llama, tied, 1F1B, stage 3", "GPT, tied, interleaved, stage 3, offload"]


@pytest.fixture(scope="module")
def expected() -> dict[str, pipeline.Curve]:
    return run_on(1, pipeline.plain, NAMES)[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_pipelines(tmp_path, ranks, expected):
    """Each stage is sharded over half of the ranks."""
    of_ranks = run_on(ranks, on_own_device, pipeline.piped, NAMES, str(tmp_path), simulated=True)
    for name, curves in zip(NAMES, zip(*of_ranks, strict=True), strict=True):
        pipeline.compare(curves, expected[name])


def test_shared_sequences_are_those_of_one_process():
    case = sequence.Case(3, "sdpa")
    losses, norms = sequence.reference(2, case._replace(stage=0))
    for ((found_losses, found_norms),) in run_on(2, sequence.share, [case], simulated=True):
        assert relative(found_losses, [each for (each,) in losses]) < 1e-6
        assert relative(found_norms, norms) < 1e-6
