"""Offload on an accelerator (a GPU or the simulated one): the same bits on every tier, however long
copies take.
"""

import gc
import random

import pytest
import torch

import zero
from tests.dist.training import Curve, assert_equal, curve_on, ds_config, start, step
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.parity.test_offload import BOTH, CPU, FILES, NVME, keys_of, offloaded
from tests.processes import run_on

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Arguments of `run_on`.
DEVICES = [
    pytest.param({"simulated": True}, id="simulated"),
    pytest.param({"gpu": True}, id="gpu", marks=ON_GPU),
]
PAGEABLE = CPU | {"pin_memory": False}
CASES = {
    "parameters": (CPU, None),
    "both": (CPU, CPU),
    "both, pageable": (PAGEABLE, PAGEABLE),
    "files": (NVME, FILES | BOTH),
}


def here(value: torch.Tensor | torch.nn.Module) -> torch.Tensor | torch.nn.Module:
    return value.to(torch.accelerator.current_accelerator())


def sleepy(kind: type, name: str) -> None:
    """Let the current stream of the device sleep for a random time before each call of a method."""
    method = getattr(kind, name)

    def after_a_sleep(*args: object, **kwargs: object) -> object:
        torch.cuda._sleep(random.randrange(2_000_000))
        return method(*args, **kwargs)

    setattr(kind, name, after_a_sleep)


def asleep(rank: int, world_size: int, sleeps: bool, *given: object) -> Curve:
    if sleeps:
        sleepy(torch.Tensor, "copy_")
        sleepy(torch.nn.Linear, "forward")
    return offloaded(rank, world_size, *given)


def assert_same_bits(device: dict, folder: object, case: str, sleeps: bool = False) -> None:
    """Compare with a run that updates on the same processor: CPU and GPU do not round Adam's update
    alike.
    """
    same = (CPU, CPU | {"overlap_step": False}) if CASES[case][1] else (None, None)
    given, expected = (keys_of(*each) for each in (CASES[case], same))
    found = curve_on(1, asleep, sleeps, str(folder), torch.float32, given, **device)
    assert_equal(found, curve_on(1, offloaded, str(folder), torch.float32, expected, **device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_same_bits(tmp_path, device, case):
    assert_same_bits(device, tmp_path, case)


@pytest.mark.parametrize("case", [pytest.param(case, marks=ON_GPU) for case in CASES])
def test_same_bits_if_copies_and_kernels_take_long(tmp_path, case):
    """A GPU is made to sleep. The simulated device is always late."""
    assert_same_bits({"gpu": True}, tmp_path, case, sleeps=True)


def relocated(rank: int, world_size: int, stage: int, moves: bool) -> list[float]:
    """Return the losses in bf16.

    With `moves`, all states go to the host and back after each step.
    """
    engine, _ = start(here(build("t5")), ds_config(**SMALL, bf16={"enabled": True}, stage=stage))
    states = (2 + 4 + 8) * sum(group.layout.shard_numel for group in engine.groups)
    losses = []
    for batch in batches("t5", 4):
        losses += step(engine, [batch])
        if moves:
            before = torch.accelerator.memory_allocated()
            engine.offload_states()
            assert before - torch.accelerator.memory_allocated() > 0.9 * states
            places = {shard.master.device.type for shard in engine.optimizer.shards.values()}
            assert places == {"cpu"}
            engine.reload_states()
            assert torch.accelerator.memory_allocated() > before - 0.1 * states
    return losses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", [2, 3])
def test_states_leave_the_device_and_come_back(device, stage):
    moved, usual = (run_on(1, relocated, stage, moves, **device) for moves in (True, False))
    assert moved == usual


def frozen_relocated(rank: int, world_size: int, stage: int) -> list[list[float]]:
    """The loss of a frozen engine (a teacher, a reference model) in two calls, and the part of its
    memory that stays on the device between them.
    """
    batch = {name: here(value) for name, value in batches("llama", 1)[0].items()}
    model = here(build("llama").requires_grad_(False))
    numel = sum(param.numel() for param in model.parameters())
    config = ds_config(**SMALL, bf16={"enabled": True}, stage=stage)
    engine = zero.initialize(model=model, config=config)[0].eval()
    found = []
    for _ in range(2):
        with torch.no_grad():
            loss = engine(**batch).loss.item()
        on_device = torch.accelerator.memory_allocated()
        engine.offload_states()
        away = torch.accelerator.memory_allocated()
        engine.reload_states()
        found.append([loss, away, on_device])
    engine.destroy()
    del engine, model
    gc.collect()
    # The rest is the batch and, on a GPU, the workspace of its library, which takes more than the
    # model does.
    rest = torch.accelerator.memory_allocated()
    assert all(on_device - rest >= 2 * numel // world_size for _, _, on_device in found)
    return [[loss, (away - rest) / (on_device - rest)] for loss, away, on_device in found]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_frozen_model_leaves_the_device_and_comes_back(device, stage, world_size):
    if world_size > 1 and "gpu" in device:
        pytest.skip("two ranks on one GPU")
    for first, second in run_on(world_size, frozen_relocated, stage, **device):
        assert first[0] == second[0]
        assert max(first[1], second[1]) < 0.01
