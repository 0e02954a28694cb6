"""Offload to files: the disk and its folder while a model trains. The result is right, or the error
is clear.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.dist.offload.test_offload import (
    FILES,
    PIPELINED,
    STEPS,
    engine_on,
    in_memory,
    plain,
)
from tests.dist.training import (
    Curve,
    assert_equal,
    assert_same_weights,
    curve_on,
    split,
    step,
    train_zero,
)
from tests.parity.models import batches
from tests.processes import run_on
from zero import build
from zero.comm import traffic, watchdog
from zero.offload.nvme import ScratchFile

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
    healthy, calls = getattr(os, call), []

    def may_fail(*args: object) -> object:
        calls.append(args)
        if len(calls) > number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return healthy(*args)

    setattr(os, call, may_fail)
    try:
        yield
    finally:
        setattr(os, call, healthy)


def half_trained(rank: int, world_size: int, folder: str, checkpoint: str) -> Curve:
    engine = engine_on(folder, FILES, PIPELINED)
    curve = train_zero(engine, batches("t5", STEPS // 2))
    engine.save_checkpoint(checkpoint)
    return curve


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
    curve_on(1, half_trained, str(folder), checkpoint)
    errors, curve = run_on(1, full_disk, str(folder), checkpoint, call, numbers, timeout=300)[0]
    for error in errors:
        assert "No space left on device" in error and remedy in error and str(folder) in error
    expected = curve_on(1, plain)
    assert curve.losses == expected.losses[STEPS // 2 :]
    assert_same_weights(curve.weights, expected.weights)
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


# -- a folder that somebody removes


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


# -- a disk that is slow


def on_a_slow_disk(rank: int, world_size: int, folder: str, delay: float) -> Curve:
    """Rank 0's disk takes `delay` seconds for each transfer, and the other rank waits for it."""
    watchdog.APART = 0.5
    for call in ("preadv", "pwritev") if rank == 0 else ():
        setattr(os, call, slowed(getattr(os, call), delay))
    return train_zero(engine_on(folder, FILES, PIPELINED), batches("t5", 3))


def slowed(call: Callable[..., int], delay: float) -> Callable[..., int]:
    def slow(*args: object) -> int:
        time.sleep(delay)
        return call(*args)

    return slow


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
    build.LEAST_BYTES_TOLD, lines = 1, []
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
