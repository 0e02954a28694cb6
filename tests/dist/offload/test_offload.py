"""Offload: what the settings do, checkpoints between tiers, and what a script does during a late
update.
"""

import io
import os
import time
from contextlib import redirect_stderr
from functools import partial
from unittest import mock

import pytest
import torch

import zero
from tests.dist.training import (
    LR,
    WEIGHT_DECAY,
    Curve,
    assert_same_weights,
    curve_on,
    ds_config,
    start,
    train_zero,
)
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import run_on
from zero.offload import tiers
from zero.optim import adam_cpu

STEPS = 8
FILES = {"device": "nvme", "max_in_cpu": 0}
PIPELINED = {"device": "nvme", "pipeline_read": True, "pipeline_write": True}
IN_MEMORY = ds_config(**{**SMALL, "sub_group_size": 20000})


def config_of(folder: str, param: dict, optimizer: dict) -> dict:
    """Every tensor that is offloaded to nvme goes to a file, however small."""
    tiers.LEAST_BYTES_IN_A_FILE = 1
    offload = {
        "offload_param": {"nvme_path": folder, **param},
        "offload_optimizer": {"nvme_path": folder, **optimizer},
    }
    return ds_config(**{**SMALL, "sub_group_size": 20000, **offload})


def engine_on(folder: str, param: dict, optimizer: dict, **others: object) -> zero.ZeroEngine:
    return start(build("t5"), config_of(folder, param, optimizer) | others)[0]


def in_memory() -> zero.ZeroEngine:
    """Make an engine without files that updates as offload does.

    Without a compiler that is torch's fused Adam.
    """
    fused = not adam_cpu.is_compiled()
    make = partial(torch.optim.AdamW, lr=LR, weight_decay=WEIGHT_DECAY, fused=fused)
    return start(build("t5"), IN_MEMORY, make=make)[0]


def plain(rank: int, world_size: int) -> Curve:
    return train_zero(in_memory(), batches("t5", STEPS))


def assert_second_half(found: Curve) -> None:
    """Compare what follows a checkpoint in the middle with a run in memory."""
    expected = curve_on(1, plain)
    assert found.losses == expected.losses[STEPS // 2 :]
    assert_same_weights(found.weights, expected.weights)


# -- settings


def settings_seen(rank: int, world_size: int, folder: str) -> dict:
    aio = {"block_size": 8192, "queue_depth": 6, "thread_count": 2}
    buffers = {"buffer_count": 3, "buffer_size": 700}
    engine = engine_on(folder, FILES | buffers, PIPELINED, aio=aio)
    files = {shard.tier.file for shard in engine.optimizer.shards.values()}
    (file,) = files | {group.tier.file for group in engine.groups if group.tier.file is not None}
    return {"settings": file.settings, "ahead": engine.schedule.prefetch_bucket_size}


def test_the_aio_section_and_the_buffers_act(tmp_path):
    found = run_on(1, settings_seen, str(tmp_path))[0]
    settings = found["settings"]
    assert (settings.block_size, settings.queue_depth, settings.thread_count) == (8192, 6, 2)
    assert found["ahead"] == 3 * 700


def timed(rank: int, world_size: int, folder: str) -> str:
    engine = engine_on(folder, FILES, PIPELINED, wall_clock_breakdown=True)
    with redirect_stderr(io.StringIO()) as printed:
        train_zero(engine, batches("t5", 3))
    return printed.getvalue()


def test_times_are_counted_by_phase(tmp_path):
    printed = run_on(1, timed, str(tmp_path))[0].splitlines()
    lines = [line for line in printed if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "step 3"]
    assert all("forward" in line and "backward" in line and "file" in line for line in lines)


# -- checkpoints


def written_and_read(
    rank: int, world_size: int, folder: str, checkpoint: str, writes: bool, files: bool
) -> Curve:
    engine = engine_on(folder, FILES, PIPELINED) if files else in_memory()
    half = STEPS // 2
    if writes:
        train_zero(engine, batches("t5", half))
        engine.save_checkpoint(checkpoint)
        return Curve()
    engine.load_checkpoint(checkpoint)
    return train_zero(engine, batches("t5", STEPS)[half:])


@pytest.mark.parametrize("from_files, to_files", [(True, False), (False, True), (True, True)])
def test_checkpoints_go_from_any_tier_to_any(tmp_path, from_files, to_files):
    folder, checkpoint = str(tmp_path / "files"), str(tmp_path / "checkpoint")
    curve_on(1, written_and_read, folder, checkpoint, True, from_files)
    assert_second_half(curve_on(1, written_and_read, folder, checkpoint, False, to_files))


# -- updates that run late


def interrupted(rank: int, world_size: int, folder: str, checkpoint: str) -> Curve:
    engine = engine_on(folder, FILES, {"device": "nvme", "overlap_step": False})
    train_zero(engine, batches("t5", STEPS // 2))
    engine.save_checkpoint(checkpoint)
    adam, calls = adam_cpu.adam, []

    def interrupts(*args: object, **kwargs: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        adam(*args, **kwargs)

    write = os.pwritev

    def slow_write(*args: object) -> int:  # goes on when the checkpoint is loaded, if it may
        time.sleep(0.1)
        return write(*args)

    with (
        mock.patch.object(adam_cpu, "adam", interrupts),
        mock.patch.object(os, "pwritev", slow_write),
        pytest.raises(KeyboardInterrupt),
    ):
        train_zero(engine, batches("t5", 1))
    with pytest.raises(RuntimeError, match="interrupted; load a checkpoint"):
        train_zero(engine, batches("t5", 1))
    engine.load_checkpoint(checkpoint)
    return train_zero(engine, batches("t5", STEPS)[STEPS // 2 :])


def test_a_step_that_was_interrupted_is_no_step_and_a_checkpoint_mends_it(tmp_path):
    folders = str(tmp_path / "files"), str(tmp_path / "checkpoint")
    assert_second_half(curve_on(1, interrupted, *folders))


def own_optimizer(rank: int, world_size: int, folder: str) -> Curve:
    """Train with the script's own optimizer and scheduler, a tensor as learning rate, and calls of
    `zero_grad`.
    """
    model = build("t5")
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    config = config_of(folder, FILES, PIPELINED) if folder else IN_MEMORY
    engine, *_ = zero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    curve = Curve()
    for batch in batches("t5", 4):
        curve.losses += train_zero(engine, [batch]).losses
        optimizer.zero_grad()
    return curve


def test_what_a_script_does_to_its_optimizer_does_not_reach_a_late_update(tmp_path):
    assert curve_on(1, own_optimizer, str(tmp_path)).losses == curve_on(1, own_optimizer, "").losses
