"""Offload: what the settings do, checkpoints between tiers, what a script does during a late
update, and the disk and its folder while a model trains. The result is right, or the error is
clear.
"""

from __future__ import annotations

import errno
import io
import itertools
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import zero
from tests.dist.training import (
    LR,
    WEIGHT_DECAY,
    Curve,
    assert_equal,
    assert_same_weights,
    curve_on,
    ds_config,
    split,
    start,
    step,
    train_zero,
)
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import on_ranks, run_on
from zero.comm import traffic, watchdog
from zero.offload import tiers
from zero.offload.nvme import ScratchFile
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


@on_ranks(1)
def test_the_aio_section_and_the_buffers_act(rank, world_size, tmp_path):
    aio = {"block_size": 8192, "queue_depth": 6, "thread_count": 2}
    buffers = {"buffer_count": 3, "buffer_size": 700}
    engine = engine_on(str(tmp_path), FILES | buffers, PIPELINED, aio=aio)
    files = {shard.tier.file for shard in engine.optimizer.shards.values()}
    (file,) = files | {group.tier.file for group in engine.groups if group.tier.file is not None}
    assert {key: getattr(file.settings, key) for key in aio} == aio
    assert engine.schedule.prefetch_bucket_size == 3 * 700


@on_ranks(1)
def test_times_are_counted_by_phase(rank, world_size, tmp_path):
    engine = engine_on(str(tmp_path), FILES, PIPELINED, wall_clock_breakdown=True)
    with redirect_stderr(io.StringIO()) as printed:
        train_zero(engine, batches("t5", 3))
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("step ")]
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


# -- the disk


IN_STEP = {"device": "nvme", "overlap_step": False}
# What a user, or another program, may have in the folder. The engine's files begin like the first.
FOREIGN = {"zero-abcdefgh": b"not ours", "notes.txt": b"notes"}


def put_foreign_files(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in FOREIGN.items():
        (folder / name).write_bytes(content)


def assert_only_foreign_files(folder: Path) -> None:
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FOREIGN


# -- a disk that is full


@contextmanager
def full_from(call: str, number: int):
    """Context in which `call` of `os` finds no space from its `number`-th time on."""
    healthy, calls = getattr(os, call), itertools.count()

    def may_fail(*args: object) -> object:
        if next(calls) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return healthy(*args)

    with mock.patch.object(os, call, may_fail):
        yield


def full_disk(
    rank: int, world_size: int, folder: str, checkpoint: str, call: str, numbers: list[int]
) -> tuple[list[str], Curve]:
    """Go on until the disk is full, and then once more, which is no step either.

    At last, with room on the disk, load the checkpoint, and train.
    """
    errors = []
    for optimizer in (PIPELINED, IN_STEP):
        for number in numbers:
            engine = engine_on(folder, FILES, optimizer)
            if call == "pwritev":  # else the first step, which makes the state, finds no space
                engine.load_checkpoint(checkpoint)
            with full_from(call, number), pytest.raises(OSError) as caught:
                train_zero(engine, batches("t5", 2))
            with pytest.raises(OSError):
                train_zero(engine, batches("t5", 2))
            errors.append(str(caught.value))
    engine.load_checkpoint(checkpoint)
    return errors, train_zero(engine, batches("t5", STEPS)[STEPS // 2 :])


@pytest.mark.parametrize(
    "call, numbers, remedy",
    [
        ("pwritev", [0, 5, 11], "order, and not full? It is the one of nvme_path"),
        ("posix_fallocate", [0, 5], "make room there"),
    ],
)
def test_a_disk_that_is_full_within_a_step_is_an_error_and_a_checkpoint_mends_it(
    tmp_path, call, numbers, remedy
):
    folder, checkpoint = tmp_path / "files", str(tmp_path / "checkpoint")
    put_foreign_files(folder)
    curve_on(1, written_and_read, str(folder), checkpoint, True, True)
    errors, curve = run_on(1, full_disk, str(folder), checkpoint, call, numbers, timeout=300)[0]
    for error in errors:
        assert "No space left on device" in error and remedy in error and str(folder) in error
    assert_second_half(curve)
    assert_only_foreign_files(folder)


def unreadable_for_a_while(rank: int, world_size: int, folder: str) -> Curve:
    engine = engine_on(folder, FILES, PIPELINED)
    for number in (0, 3):  # in the first forward, which needs weights of the file
        with full_from("preadv", number), pytest.raises(OSError, match="reading from"):
            train_zero(engine, batches("t5", 1))
    return train_zero(engine, batches("t5", STEPS))


def test_a_forward_that_could_not_read_its_weights_can_be_repeated(tmp_path):
    assert_equal(curve_on(1, unreadable_for_a_while, str(tmp_path)), curve_on(1, plain))


def full_on_one_rank(rank: int, world_size: int, folder: str) -> None:
    engine = engine_on(folder, FILES, PIPELINED)
    with full_from("pwritev", 20 if rank else 10**9):
        train_zero(engine, batches("t5", STEPS))


def test_a_disk_that_is_full_on_one_rank_ends_the_job_with_its_error(tmp_path):
    put_foreign_files(tmp_path)
    with pytest.raises(RuntimeError, match=r"No space left on device; is that disk in order"):
        run_on(2, full_on_one_rank, str(tmp_path))
    assert_only_foreign_files(tmp_path)


# -- a folder or a file that somebody removes or changes, or leaves behind


def without_its_folder(rank: int, world_size: int, folder: str, checkpoint: str) -> Curve:
    engine = engine_on(folder, FILES, PIPELINED)
    curve = train_zero(engine, batches("t5", 2))
    shutil.rmtree(folder)
    engine.save_checkpoint(checkpoint)
    engine.load_checkpoint(checkpoint)
    rest = train_zero(engine, batches("t5", STEPS)[2:])
    return Curve(curve.losses + rest.losses, curve.norms + rest.norms, rest.weights)


def test_what_happens_to_the_folder_does_not_reach_training(tmp_path):
    folder, checkpoint = tmp_path / "files", tmp_path / "checkpoint"
    found = curve_on(1, without_its_folder, str(folder), str(checkpoint))
    assert_equal(found, curve_on(1, plain))


@on_ranks(1)
def test_a_file_that_was_cut_is_an_error(rank, world_size, tmp_path):
    """The file has no name, so only a process that searches /proc can cut it."""
    engine = engine_on(str(tmp_path), FILES, IN_STEP)
    train_zero(engine, batches("t5", 1))
    file = next(group.tier.file for group in engine.groups if group.tier.file is not None)
    os.ftruncate(file._file, 0)
    with pytest.raises(OSError, match=f"reading from {tmp_path}, .*the file ends"):
        train_zero(engine, batches("t5", 1))


def killed_in_a_step(rank: int, world_size: int, folder: str) -> None:
    write, calls = os.pwritev, itertools.count()

    def writes(*args: object) -> int:
        if next(calls) == 200:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    with mock.patch.object(os, "pwritev", writes):
        train_zero(engine_on(folder, FILES, PIPELINED), batches("t5", 100))


def test_a_job_that_is_killed_in_a_step_leaves_nothing(tmp_path):
    put_foreign_files(tmp_path)
    with pytest.raises(RuntimeError, match=f"code {-signal.SIGKILL}"):
        run_on(1, killed_in_a_step, str(tmp_path))
    assert_only_foreign_files(tmp_path)


# -- a disk that is slow


def on_a_slow_disk(rank: int, world_size: int, folder: str, delay: float) -> Curve:
    """Rank 0's disk takes `delay` seconds for each transfer, and the other rank waits for it."""
    watchdog.APART = 0.5

    def slow(call: Callable[..., int], *args: object) -> int:
        time.sleep(delay)
        return call(*args)

    for name in ("preadv", "pwritev") if rank == 0 else ():
        setattr(os, name, partial(slow, getattr(os, name)))
    return train_zero(engine_on(folder, FILES, PIPELINED), batches("t5", 3))


def test_a_slow_disk_gives_the_right_result_and_is_no_hang(tmp_path):
    """Each wait of the other rank is longer than those after which it would say that ranks wait at
    different places.
    """
    slow = curve_on(2, on_a_slow_disk, str(tmp_path), 0.3, timeout=300)
    assert_equal(slow, curve_on(2, on_a_slow_disk, str(tmp_path), 0.0))


# -- what is said at the start


def told(rank: int, world_size: int, folder: str, files: bool) -> tuple[list[str], float]:
    """Return the lines about files, and the bytes that later steps move to and from them, on
    average.
    """
    zero.build.LEAST_BYTES_TOLD, lines = 1, []
    ScratchFile.measure = lambda *_: (2e6 / (1 + rank), 2e7)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("zero").addHandler(handler)
    engine = engine_on(folder, FILES, IN_STEP) if files else in_memory()
    train_zero(engine, batches("t5", 2))
    before = traffic.MOVED.copy()
    for batch in batches("t5", STEPS):  # of one, some reads are in the step before or after it
        step(engine, split(batch, world_size)[rank : rank + 1])
    moved = traffic.MOVED - before
    found = [line for line in lines if line.startswith("files: ")]
    return found, (moved[traffic.READ] + moved[traffic.WRITTEN]) / STEPS


def test_the_start_tells_how_long_files_take_on_the_slowest_rank(tmp_path):
    (lines, moved), (others, _) = run_on(2, told, str(tmp_path), True)
    assert others == [] and len(lines) == 1
    pattern = (
        r"files: about (\S+) GB a step on each rank, (\S+) s at this disk's (\S+) GB/s; "
        r"in host memory (\S+) s"
    )
    number, in_files, speed, in_memory = map(float, re.fullmatch(pattern, lines[0]).groups())
    assert speed == 0.001  # rank 1's, the slower one
    assert 0.7 * moved < number * 1e9 < 1.3 * moved
    assert in_files == pytest.approx(number / speed, rel=0.01)
    assert in_memory == pytest.approx(number / 0.02, rel=0.01)
    assert run_on(1, told, str(tmp_path), False)[0] == ([], 0)
