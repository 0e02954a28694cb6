"""Disks that are full, damaged files, and ranks killed in the middle of a save; asynchronous saves,
which hold the state of the save, are complete when the process ends, and report failures.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

import zero
from tests.dist.training import ds_config, start, train_zero
from tests.parity.models import batches, build
from tests.processes import child_environment, fork_ranks, kill_tree, run_on
from zero.checkpoint import disk, training
from zero.checkpoint.blocks import verify
from zero.checkpoint.disk import LOCK
from zero.checkpoint.files import open_checkpoint
from zero.checkpoint.folder import find_intact, locate
from zero.checkpoint.manifest import MANIFEST, DamagedCheckpointError, to_text
from zero.engine import ZeroEngine
from zero.threads import EngineThread


def two_saves(folder: str) -> zero.ZeroEngine:
    engine, _ = start(build("gpt2"), ds_config())
    for batch in batches("gpt2", 2):
        train_zero(engine, [batch])
        engine.save_checkpoint(folder)
    return engine


def failing_save(rank: int, world_size: int, folder: str) -> str:
    """Let a third save fail. Then load the second checkpoint, and save again with success."""
    engine = two_saves(folder)
    expected = engine._zero3_consolidated_16bit_state_dict()
    train_zero(engine, batches("gpt2", 1))
    limit_file_size(rank)
    try:
        with pytest.raises(OSError) as caught:
            engine.save_checkpoint(folder)
    finally:
        lift_file_size_limit()
    dist.barrier()
    assert engine.load_checkpoint(folder)[0] == str(Path(folder) / "global_step2")
    loaded = engine._zero3_consolidated_16bit_state_dict()
    if rank == 0:
        assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    engine.save_checkpoint(folder, tag="after")
    dist.barrier()
    names = ["after", "global_step1", "global_step2", "latest", "zero_to_fp32.py"]
    assert sorted(path.name for path in Path(folder).iterdir() if path.name != LOCK) == names
    return str(caught.value)


def limit_file_size(rank: int) -> None:
    """Make the operating system refuse files of more than 20 kB on rank 1, as a full disk would."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def lift_file_size_limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_disk_that_fills_up_on_one_rank(tmp_path):
    first, second = run_on(2, failing_save, str(tmp_path))
    assert first == second
    assert "rank 1" in first and "File too large" in first and str(tmp_path) in first


def flipped(content: bytes) -> bytes:
    damaged = bytearray(content)
    damaged[len(damaged) // 3] ^= 0x10
    return damaged


FORGED = {
    "optimizer": lambda content: content["optimizer"].update(groups=[{"$type": "tuple"}]),
    "random_states": lambda content: content["random_states"][0].update(python=[1, 2, 3]),
}


def forged(part: str, text: bytes) -> bytes:
    """Values of another kind, with a correct checksum."""
    content = json.loads(text)
    del content["checksum"]
    FORGED[part](content)
    return to_text(content).encode()


def load_damaged(rank: int, world_size: int, folder: str) -> list[str]:
    engine = two_saves(folder)
    place, messages = Path(folder) / "global_step2", []
    names = [*sorted(json.loads((place / MANIFEST).read_text())["files"]), MANIFEST]
    damages = [(name, flipped) for name in names]
    damages += [(MANIFEST, partial(forged, part)) for part in FORGED]
    for name, damage in damages:
        content = (place / name).read_bytes()
        dist.barrier()
        if rank == 0:
            (place / name).write_bytes(damage(content))
        dist.barrier()
        with pytest.raises(DamagedCheckpointError) as caught:
            engine.load_checkpoint(folder)
        messages.append(str(caught.value))
        assert f"{place / name} is damaged" in messages[-1]
        dist.barrier()
        if rank == 0:
            (place / name).write_bytes(content)
        dist.barrier()
    engine.load_checkpoint(folder)
    return messages


def test_damaged_files_are_named_on_every_rank_and_an_intact_checkpoint_is_offered(tmp_path):
    first, second = run_on(2, load_damaged, str(tmp_path))
    assert first == second
    offer = f"the newest earlier intact checkpoint is {tmp_path / 'global_step1'}"
    # One file for each rank, and the manifest.
    assert [message.endswith(offer) for message in first[:3]] == [True] * 3
    for part, message in zip(FORGED, first[3:], strict=True):
        assert f"checkpoint.json is damaged: {part}" in message, message


# -- killed in the middle of a save


KILLS = int(os.environ.get("ZERO_TEST_KILLS", "8"))


def fill(engine: zero.ZeroEngine, step: int) -> None:
    """Set every number of the training state to `step`. Then a mixture of two saves can be seen."""
    with torch.no_grad():
        for shard in engine.optimizer.shards.values():
            shard.master.fill_(step)
        for state in engine.optimizer.state.values():
            state["momentum_buffer"].fill_(step)
    engine.global_steps = step


def save_until_killed(
    rank: int, world_size: int, cycle: int, folder: Path, victim: int, delay: float
) -> None:
    """Load the newest checkpoint, then save step after step, until `victim` is killed after
    `delay` seconds. `folder`/report has the cycle and the last complete save."""
    report = folder.with_name("report")
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    config = ds_config() | {"checkpoint": {"async_save": cycle % 2 == 1}}
    engine, _ = start(model, config, make=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
    step, (path, state) = 0, engine.load_checkpoint(folder)
    if path is not None:
        step = state["step"]
        found = [shard.master for shard in engine.optimizer.shards.values()]
        found += [state["momentum_buffer"] for state in engine.optimizer.state.values()]
        values = {*torch.cat(found).tolist()} - {0.0}  # padding
        assert values == {float(step)} and engine.global_steps == step
    dist.barrier()
    report.write_text(f"{cycle} {step}")
    dist.barrier()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        step += 1
        fill(engine, step)
        engine.save_checkpoint(folder, client_state={"step": step})
        if cycle % 2:
            fill(engine, step + 1)  # while the save goes on in the background
            engine.wait_for_checkpoint()
        if rank == 0:
            disk.replace_text(report, f"{cycle} {step}")


@pytest.mark.timeout(120 + 10 * KILLS)
def test_every_state_left_by_a_killed_save_loads(tmp_path):
    chance = random.Random(20)
    folder = tmp_path / "checkpoints"
    interrupted = complete = 0
    for cycle in range(KILLS):
        # One or two saves take this time. So kills come before, within and after writing, renaming
        # and cleaning up.
        victim, delay = chance.randrange(2), chance.uniform(0.0, 0.15)
        with pytest.raises(RuntimeError) as killed:
            run_on(2, save_until_killed, cycle, folder, victim, delay)
        loaded, step = map(int, (tmp_path / "report").read_text().split())
        assert loaded == cycle, f"the ranks did not load what the kill before left: {killed.value}"
        assert step >= complete
        complete = step
        interrupted += any(folder.glob(".saving-*"))
        if complete:
            reader = open_checkpoint(locate(folder, None))
            verify(reader.folder, reader.manifest)
            assert reader.manifest.client_state["step"] >= complete
    assert interrupted >= KILLS // 5, "hardly any kill hit a save: this test proves nothing"


# -- asynchronous saves


ASYNC = {"checkpoint": {"async_save": True}}


def state(engine: ZeroEngine) -> list[torch.Tensor]:
    """Return copies of this rank's masters and moments."""
    sub_groups = engine.optimizer.sub_groups
    moments = [
        engine.optimizer.state[sub_group.master][key]
        for sub_group in sub_groups
        for key in ("exp_avg", "exp_avg_sq")
    ]
    return [values.clone() for values in (*(each.master for each in sub_groups), *moments)]


def save_and_train_on(rank: int, world_size: int, folder: str) -> tuple[bool, bool, str]:
    """Delay the writing until two more steps are done. A second save waits for the first one."""
    engine, _ = start(build("gpt2"), ds_config(bf16={"enabled": True}) | ASYNC)
    data, trained, write = batches("gpt2", 4), threading.Event(), training.write

    def write_later(*args):
        assert trained.wait(60)
        return write(*args)

    train_zero(engine, data[:2])
    expected = state(engine)
    with mock.patch.object(training, "write", write_later):
        engine.save_checkpoint(folder)
        train_zero(engine, data[2:])
        moved = not torch.equal(expected[0], state(engine)[0])
        before = locate(Path(folder), None)
        trained.set()
        engine.save_checkpoint(folder)
        first = locate(Path(folder), None)
        engine.wait_for_checkpoint()
    other, _ = start(build("gpt2"), ds_config(bf16={"enabled": True}))
    other.load_checkpoint(folder, tag="global_step2")
    same = all(torch.equal(a, b) for a, b in zip(state(other), expected, strict=True))
    return moved and before is None, same, f"{first.name} {locate(Path(folder), None).name}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_written_is_the_state_of_the_save(world_size, tmp_path):
    expected = (True, True, "global_step2 global_step4")
    assert run_on(world_size, save_and_train_on, str(tmp_path)) == [expected] * world_size


def fail_in_the_background(rank: int, world_size: int, folder: str) -> tuple[int, str, str]:
    engine, _ = start(build("gpt2"), ds_config() | ASYNC)
    data = batches("gpt2", 1)
    train_zero(engine, data)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    limit_file_size(rank)
    engine.save_checkpoint(folder, tag="fails")
    steps = 0
    try:
        with pytest.raises(OSError) as caught:
            while steps < 10_000:
                train_zero(engine, data)
                steps += 1
    finally:
        lift_file_size_limit()
    path, _ = engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, tag="after")
    engine.wait_for_checkpoint()
    return steps, str(caught.value), Path(path).name


def test_a_failure_is_raised_at_the_same_step_on_every_rank(tmp_path):
    first, second = run_on(2, fail_in_the_background, str(tmp_path))
    assert first == second
    assert "rank 1" in first[1] and "File too large" in first[1] and first[2] == "global_step1"
    left = {path.name for path in tmp_path.iterdir() if path.name != LOCK}
    assert left == {"after", "global_step1", "latest", "zero_to_fp32.py"}


def fail_after_begin(
    rank: int, world_size: int, folder: str, name: str, failing: int, config: dict
) -> tuple[str, list[str]]:
    engine, _ = start(build("gpt2"), ds_config() | config)
    error = MemoryError("no host memory")
    with contextlib.ExitStack() as stack:
        if rank == failing:
            stack.enter_context(mock.patch(f"zero.{name}", side_effect=error))
        with pytest.raises(RuntimeError) as caught:
            engine.save_checkpoint(folder, tag="fails")
    left = sorted(path.name for path in Path(folder).glob(".saving*"))
    engine.save_checkpoint(folder, tag="after")
    engine.wait_for_checkpoint()
    return str(caught.value), left


@pytest.mark.parametrize(
    ("name", "failing", "config"),
    [
        ("checkpoint.training.BackgroundSaves.copy", 1, ASYNC),
        ("checkpoint.training._Save.all_slices", 1, ASYNC),
        ("checkpoint.training._Save.all_slices", 1, {}),
        ("checkpoint.folder.sync_later", 0, {}),
        ("core.forward_writes.ForwardWrites.between_passes", 1, {}),
    ],
)
def test_a_rank_that_lacks_memory_fails_on_every_rank(name, failing, config, tmp_path):
    first, second = run_on(2, fail_after_begin, str(tmp_path), name, failing, config)
    assert f"rank {failing}: MemoryError: no host memory" in first[0] and first[0] == second[0]
    assert first[1] == [] and find_intact(tmp_path) == tmp_path / "after"


def without_a_thread(rank: int, world_size: int, folder: str) -> None:
    engine, _ = start(build("gpt2"), ds_config() | ASYNC)
    with mock.patch.object(EngineThread, "start", side_effect=RuntimeError("no thread")):
        with pytest.raises(RuntimeError, match="no thread"):
            engine.save_checkpoint(folder)
    train_zero(engine, batches("gpt2", 1))
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()


def test_training_goes_on_where_the_thread_cannot_start(tmp_path):
    run_on(1, without_a_thread, str(tmp_path), timeout=120.0)
    assert find_intact(tmp_path) == tmp_path / "global_step1"


def two_engines(rank: int, world_size: int, folder: str) -> None:
    """Each engine saves while the other one's save is running, also under the same tag."""
    engines = [start(build("gpt2"), ds_config() | ASYNC)[0] for _ in range(2)]
    for tags in [("a", "b"), ("same", "same")] * 2:
        expected = defaultdict(list)
        for engine, tag in zip(engines, tags, strict=True):
            train_zero(engine, batches("gpt2", 1))
            expected[tag].append(state(engine))
            engine.save_checkpoint(folder, tag=tag)
        for engine in engines:
            engine.wait_for_checkpoint()
        other, _ = start(build("gpt2"), ds_config())
        for tag, states in expected.items():
            other.load_checkpoint(folder, tag=tag)
            assert any(all(map(torch.equal, state(other), each)) for each in states)


def test_two_engines_save_into_one_folder(tmp_path):
    run_on(2, two_engines, str(tmp_path))
    left = {path.name for path in tmp_path.iterdir() if path.name != LOCK}
    assert left == {"a", "b", "same", "latest", "zero_to_fp32.py"}


SCRIPT = """
import resource, signal, sys
import torch
import zero

engine = zero.initialize(
    model=torch.nn.Linear(1000, 1000),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3},
        "checkpoint": {"async_save": True},
    },
)[0]
engine.save_checkpoint(sys.argv[1], tag="good")
if sys.argv[2] == "full":
    engine.wait_for_checkpoint()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    engine.save_checkpoint(sys.argv[1], tag="bad")
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("disk", ["free", "full"])
def test_exit_waits_and_tells_of_a_failure(disk, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "checkpoints"
    process = fork_ranks(script, folder, disk, nproc=2, timeout=120, imported="zero")
    assert find_intact(folder) == folder / "good", process.stderr
    assert not list(folder.glob(".saving*"))
    assert (process.returncode == 0) == (disk == "free"), process.stderr
    assert ("File too large" in process.stderr) == (disk == "full")


ENDLESS = """
import os, sys, time
import zero

config = {"train_micro_batch_size_per_gpu": 1}
engine = zero.initialize(model=__import__("torch").nn.Linear(2, 2), config=config)[0]
open(f"{sys.argv[1]}/{os.getpid()}", "w")
time.sleep(300)
"""


def test_ranks_end_when_torchrun_is_killed(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "pids"
    folder.mkdir()
    script.write_text(ENDLESS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc_per_node", "2", script, folder]
    process = subprocess.Popen(command, env=child_environment(), stderr=subprocess.PIPE, text=True)

    def ranks() -> list[int]:
        return [int(path.name) for path in folder.iterdir()]

    try:
        wait_until(lambda: len(ranks()) == 2)
        process.kill()
        wait_until(lambda: not any(map(psutil.pid_exists, ranks())))
        assert f"the launcher (process {process.pid}) is gone" in process.communicate()[1]
    finally:
        for pid in (process.pid, *ranks()):
            kill_tree(pid)


def wait_until(condition: Callable[[], bool], seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
