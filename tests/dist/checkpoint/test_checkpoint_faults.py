"""Disks that are full or read-only, damaged files, and ranks killed in the middle of a save."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zero
from tests.dist.training import ds_config, start, train_zero
from tests.parity.models import batches, build
from tests.processes import run_on
from zero.checkpoint import disk
from zero.checkpoint.blocks import verify
from zero.checkpoint.disk import LOCK
from zero.checkpoint.files import open_checkpoint
from zero.checkpoint.folder import locate
from zero.checkpoint.manifest import MANIFEST, DamagedCheckpointError, to_text


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
