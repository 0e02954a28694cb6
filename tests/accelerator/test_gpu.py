"""The engine on a real GPU, in one process: losses and weights are those of plain torch on that
GPU, bit for bit.

The state is updated on the GPU. If the optimizer is offloaded, the CPU updates it, and the numbers
equal within rounding. `test_offload` has the tiers. The simulated device has what one process
cannot show."""

import os
from functools import partial
from typing import Any

import pytest
import torch

import zero
from tests.accelerator.test_offload import ON_GPU, here
from tests.dist.training import (
    Curve,
    assert_same_training,
    curve_on,
    ds_config,
    relative,
    train_in_slices,
)
from tests.parity.models import VOCABULARY, batches, build, sharded
from tests.parity.test_fp32 import SMALL
from tests.parity.test_mixed_precision import SCALE, SECTIONS
from tests.tolerance import rounding

pytestmark = ON_GPU
STEPS = 5
FP32 = torch.float32
SECTIONS = {FP32: {}} | SECTIONS


def model(name: str) -> torch.nn.Module:
    """On the GPU, whose kernels add in the same order each time, with checkpointed Llamas."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    made: Any = build(name)
    if name == "llama":
        made.gradient_checkpointing_enable({"use_reentrant": False})
    return here(made)


def plain(rank: int, world_size: int, name: str, dtype: torch.dtype, accumulation: int) -> Curve:
    data = [{key: here(value) for key, value in batch.items()} for batch in batches(name, STEPS)]
    scale = SCALE if dtype == torch.float16 else 1.0
    curve = train_in_slices(model(name), data, 1, accumulation, dtype=dtype, scale=scale)
    curve.weights = {key: value.cpu() for key, value in curve.weights.items()}
    return curve


def found(name: str, dtype: torch.dtype, accumulation: int, **sections: Any) -> Curve:
    config = ds_config(accumulation=accumulation, **SMALL | SECTIONS[dtype] | sections)
    given = partial(model, name), batches(name, STEPS), config, {"look": is_on_the_gpu}
    return curve_on(1, sharded, *given, gpu=True)


def is_on_the_gpu(engine: zero.ZeroEngine) -> None:
    assert engine.comm.device == torch.device("cuda", 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", list(SECTIONS), ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("name", "accumulation"), [("t5", 1), ("llama", 2)])
def test_training_is_that_of_plain_torch(name, accumulation, dtype, stage):
    expected = curve_on(1, plain, name, dtype, accumulation, gpu=True)
    assert_same_training(found(name, dtype, accumulation, stage=stage), expected)


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_gives_the_same_numbers(dtype, stage):
    expected = curve_on(1, plain, "t5", dtype, 1, gpu=True).mean_losses()
    offload = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    within = rounding(dtype, VOCABULARY, STEPS)
    assert relative(found("t5", dtype, 1, **offload).mean_losses(), expected) <= within


def test_activations_on_the_host_change_nothing():
    away = {"activation_checkpointing": {"cpu_checkpointing": True}}
    bf16 = "llama", torch.bfloat16, 1
    assert found(*bf16, **away).losses == found(*bf16).losses


def test_compiled_blocks_train_alike():
    losses = []
    for compiles in (True, False):
        config = ds_config(**SMALL, bf16={"enabled": True}, compile={"enabled": compiles})
        given = "llama", batches("llama", STEPS), config, {"look": is_on_the_gpu}
        losses.append(curve_on(1, sharded, *given, gpu=True, timeout=300).mean_losses())
    assert relative(*losses) <= rounding(torch.bfloat16, VOCABULARY, STEPS)
