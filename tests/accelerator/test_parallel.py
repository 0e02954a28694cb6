"""Tensor parallelism and pipelines on the simulated accelerator: free of mistakes, with the numbers
of plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.accelerator import device
from tests.dist.training import ds_config, step
from tests.parity import test_experts_stay as experts
from tests.parity import test_pipeline as pipeline
from tests.parity import test_tensor_parallel as tensor
from tests.processes import run_on
from zero.offload import activations


def on_device(rank: int, world_size: int, train: Callable, *args: Any) -> Any:
    activations.MIN_BYTES = 1
    found = train(rank, world_size, *args)
    used = [torch.accelerator.max_memory_allocated(number) > 0 for number in range(2)]
    assert used == [number == rank % 2 for number in range(2)], (
        "each rank computes on its own device"
    )
    return found


def test_layers_in_parts():
    """Activations, some of them `DTensor`s, go to the host."""
    section = {"activation_checkpointing": {"cpu_checkpointing": True}}
    cases = [("llama", tensor.NOTHING_PERSISTS | section), ("layers", {"stage": 1} | section)]
    tensor.compare(run_on(2, on_device, tensor.trained, cases, simulated=True), cases)


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
    of_ranks = run_on(ranks, on_device, experts.trained, cases, simulated=True)
    for curves in zip(*of_ranks, strict=True):
        experts.compare(experts.together(curves), experts.plain("mixtral"))


NAMES = ["Llama, tied, 1F1B, stage 3", "GPT, tied, interleaved, stage 3, offload"]


@pytest.fixture(scope="module")
def expected() -> dict[str, pipeline.Curve]:
    return run_on(1, pipeline.plain, NAMES)[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_pipelines(tmp_path, ranks, expected):
    """Each stage is sharded over half of the ranks."""
    of_ranks = run_on(ranks, on_device, pipeline.piped, NAMES, str(tmp_path), simulated=True)
    for name, curves in zip(NAMES, zip(*of_ranks, strict=True), strict=True):
        pipeline.compare(curves, expected[name])
