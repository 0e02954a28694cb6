"""What the engine reads before its time is never what somebody has changed meanwhile.

With files the first sub-groups are read for the next step, and updated weights stay in host memory
until they are gathered. Whatever a script does between two steps, results equal those of a run in
memory, bit for bit.
"""

import random

import pytest
import torch

import zero
from tests.dist.training import ds_config
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import run_on
from zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from zero.offload import tiers

STEPS = 14
MOMENT = "exp_avg"


def set_value(engine, param, factor, folder):
    safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * factor)


def set_moment(engine, param, factor, folder):
    safe_set_full_optimizer_state(
        param, safe_get_full_optimizer_state(param, MOMENT) * factor, MOMENT
    )


def write_while_gathered(engine, param, factor, folder):
    with zero.GatheredParameters([param], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            param.data.mul_(factor)


def change_state_in_place(engine, param, factor, folder):
    for state in engine.optimizer.state.values():
        if state[MOMENT].is_floating_point():
            state[MOMENT].mul_(factor)


def save_and_load(engine, param, factor, folder):
    engine.save_checkpoint(folder, "now")
    set_value(engine, param, factor, folder)
    engine.load_checkpoint(folder, "now")


def read_values(engine, param, factor, folder):
    return safe_get_full_fp32_param(param).norm().item()


EVENTS = (set_value, set_moment, write_while_gathered, change_state_in_place, save_and_load)
EVENTS += (read_values,)


def train(rank: int, world_size: int, folder: str, seed: int, optimizer: dict, others: dict):
    tiers.LEAST_BYTES_IN_A_FILE = 1
    rng, found = random.Random(seed), []
    sections = {**SMALL, "offload_optimizer": optimizer | {"nvme_path": folder}, **others}
    if optimizer["device"] == "nvme":
        sections["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    model = build("t5")
    params = list(model.parameters())
    groups = [{"params": params[::3], "weight_decay": 0.0}, {"params": params[1::3] + params[2::3]}]
    adam = torch.optim.AdamW(groups, lr=1e-3)
    config = ds_config(accumulation=2, clip=0.5, **sections)
    engine = zero.initialize(model=model, optimizer=adam, config=config)[0]
    for number, batch in enumerate(batches("t5", 2 * STEPS)):
        loss = engine(**batch).loss
        engine.backward(loss)
        if rng.random() < 0.2 and (grad := safe_get_full_grad(rng.choice(params))) is not None:
            found.append(grad.norm().item())
        engine.step()
        found.append(loss.item())
        event, param, factor = rng.choice(EVENTS), rng.choice(params), 1 + rng.random() / 5
        if number % 2:
            found.append(event(engine, param, factor, f"{folder}/{optimizer['device']}"))
    found += [safe_get_full_fp32_param(param).double().sum().item() for param in params]
    return found


BF16 = {"bf16": {"enabled": True}}
FEW = {"sub_group_size": 500}
NO_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}


@pytest.mark.parametrize(
    ("ranks", "seed", "optimizer", "others"),
    [
        (1, 1, {}, FEW),
        (2, 2, {"max_in_cpu": 0}, FEW | {"stage3_max_live_parameters": 0}),
        (1, 3, {"buffer_count": 1, "buffer_size": 700}, BF16 | FEW),
        (1, 4, {"overlap_step": False, "max_in_cpu": 20000}, {"zero_quantized_moments": True}),
        (1, 5, {"pipeline_read": False, "pipeline_write": False}, BF16),
        (2, 6, {}, {"zero_quantized_moments": True, "bf16": NO_MASTERS}),
    ],
)
def test_changes_between_steps_are_seen(tmp_path, ranks, seed, optimizer, others):
    from_files = {"device": "nvme", **optimizer}
    args = str(tmp_path), seed
    expected = run_on(ranks, train, *args, {"device": "cpu", "overlap_step": False}, others)
    assert run_on(ranks, train, *args, from_files, others) == expected
