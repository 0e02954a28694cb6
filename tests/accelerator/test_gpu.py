"""The engine on a real GPU, in one process: losses and weights are those of plain torch on that
GPU, bit for bit.

The state is updated on the GPU. If the optimizer is offloaded, the CPU updates it, and the numbers
equal within rounding. `test_offload` has the tiers. The simulated device has what one process
cannot show."""

import os

import pytest
import torch

from tests.accelerator.test_offload import ON_GPU, here
from tests.dist.training import (
    Curve,
    assert_same_training,
    curve_on,
    ds_config,
    relative,
    start,
    step,
    train_in_slices,
    train_zero,
)
from tests.parity.models import VOCABULARY, batches, build
from tests.parity.test_fp32 import SMALL
from tests.parity.test_mixed_precision import SCALE, SECTIONS
from tests.processes import run_on
from tests.tolerance import rounding

pytestmark = ON_GPU
STEPS = 5
FP32 = torch.float32
SECTIONS = {FP32: {}} | SECTIONS


def deterministic() -> None:
    """Let a kernel add in the same order each time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


def data(name: str, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    return [{key: here(value) for key, value in batch.items()} for batch in batches(name, steps)]


def plain(rank: int, world_size: int, name: str, dtype: torch.dtype, accumulation: int) -> Curve:
    deterministic()
    scale = SCALE if dtype == torch.float16 else 1.0
    curve = train_in_slices(
        here(build(name)), data(name), 1, accumulation, dtype=dtype, scale=scale
    )
    curve.weights = {key: value.cpu() for key, value in curve.weights.items()}
    return curve


def sharded(
    rank: int, world_size: int, name: str, dtype: torch.dtype, accumulation: int, sections: dict
) -> Curve:
    deterministic()
    config = ds_config(accumulation=accumulation, **{**SMALL, **SECTIONS[dtype], **sections})
    engine, _ = start(here(build(name)), config)
    assert engine.comm.device == torch.device("cuda", 0)
    return train_zero(engine, data(name))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", list(SECTIONS), ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("name", "accumulation"), [("t5", 1), ("llama", 2)])
def test_training_is_that_of_plain_torch(name, accumulation, dtype, stage):
    found = curve_on(1, sharded, name, dtype, accumulation, {"stage": stage}, gpu=True)
    assert_same_training(found, curve_on(1, plain, name, dtype, accumulation, gpu=True))


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_gives_the_same_numbers(dtype, stage):
    found = curve_on(
        1,
        sharded,
        "t5",
        dtype,
        1,
        {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        gpu=True,
    )
    expected = curve_on(1, plain, "t5", dtype, 1, gpu=True)
    assert relative(found.mean_losses(), expected.mean_losses()) <= rounding(
        dtype, VOCABULARY, STEPS
    )


def recomputed(rank: int, world_size: int, sections: dict) -> list[list[float]]:
    """Train a Llama whose blocks are checkpointed by transformers."""
    deterministic()
    model = here(build("llama"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, _ = start(model, ds_config(**{**SMALL, **SECTIONS[torch.bfloat16], **sections}))
    return [step(engine, [batch]) for batch in data("llama")]


def test_activations_on_the_host_change_nothing():
    away = {"activation_checkpointing": {"cpu_checkpointing": True}}
    assert run_on(1, recomputed, away, gpu=True) == run_on(1, recomputed, {}, gpu=True)


def compiled(rank: int, world_size: int, enabled: bool) -> list[float]:
    config = ds_config(**SMALL, bf16={"enabled": True}) | {"compile": {"enabled": enabled}}
    engine, _ = start(here(build("llama")), config)
    return [step(engine, [batch])[0] for batch in data("llama")]


def test_compiled_blocks_train_alike():
    found, expected = (
        run_on(1, compiled, enabled, gpu=True, timeout=300)[0] for enabled in (True, False)
    )
    assert relative(found, expected) <= rounding(torch.bfloat16, VOCABULARY, STEPS)
