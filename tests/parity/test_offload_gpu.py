"""On a GPU: the same bits wherever state lies and however long copies take, as copies run on streams of their own."""

import random

import pytest
import torch

from tests.dist.training import Curve, assert_equal, curve_on, ds_config, start, train_zero
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.parity.test_offload import BOTH, NVME
from tests.processes import run_on
from zero.offload import tiers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 20
CASES = {
    "parameters": ({"device": "cpu"}, {"device": "none"}),
    "both": ({"device": "cpu"}, {"device": "cpu"}),
    "both, step not behind": ({"device": "cpu"}, {"device": "cpu", "overlap_step": False}),
    "both, pageable": ({"device": "cpu", "pin_memory": False}, {"device": "cpu", "pin_memory": False}),
    "files": (NVME, {"device": "nvme", **BOTH}),
}


def sleepy(kind: type, name: str) -> None:
    """Let the device sleep at random before each call of a method, on the stream that is current then."""
    method = getattr(kind, name)

    def after_a_sleep(*args: object, **kwargs: object) -> object:
        torch.cuda._sleep(random.randrange(2_000_000))
        return method(*args, **kwargs)

    setattr(kind, name, after_a_sleep)


def trained(rank: int, world_size: int, folder: str, param: dict, optimizer: dict, sleeps: bool) -> Curve:
    tiers.LEAST_BYTES_IN_A_FILE = 1
    if sleeps:
        sleepy(torch.Tensor, "copy_")
        sleepy(torch.nn.Linear, "forward")
    offload = {"offload_param": {"nvme_path": folder, **param}, "offload_optimizer": {"nvme_path": folder, **optimizer}}
    config = ds_config(clip=0.5, **{**SMALL, "sub_group_size": 20000, **offload})
    engine, _ = start(build("t5").cuda(), config)
    on_device = [{name: value.cuda() for name, value in batch.items()} for batch in batches("t5", STEPS)]
    return train_zero(engine, on_device)


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_same_bits(tmp_path, case, sleeps):
    """Of an optimizer whose update both processors round alike: Adam's last bits are each one's own."""
    param, optimizer = CASES[case]
    away = optimizer["device"] != "none"
    found = curve_on(1, trained, str(tmp_path), param, optimizer, sleeps)
    same = ({"device": "cpu"}, {"device": "cpu", "overlap_step": False}) if away else ({}, {})
    assert_equal(found, curve_on(1, trained, str(tmp_path), *same, False))


def relocated(rank: int, world_size: int, moves: bool) -> list[float]:
    """Losses in 16 bits, all states going to the host and back after each step."""
    engine, _ = start(build("t5").cuda(), ds_config(**SMALL, bf16={"enabled": True}))
    states = (2 + 4 + 4 + 8) * sum(unit.layout.shard_numel for unit in engine.units)
    losses = []
    for batch in batches("t5", 4):
        loss = engine(**{name: value.cuda() for name, value in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if moves:
            before = torch.cuda.memory_allocated()
            engine.offload_states()
            assert before - torch.cuda.memory_allocated() > 0.9 * states
            assert {shard.master.device.type for shard in engine.optimizer.shards.values()} == {"cpu"}
            engine.reload_states()
            assert torch.cuda.memory_allocated() > before - 0.1 * states
    return losses


def test_states_leave_the_device_and_come_back():
    assert run_on(1, relocated, True) == run_on(1, relocated, False)
