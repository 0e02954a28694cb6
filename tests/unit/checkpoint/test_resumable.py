"""The Trainer's folders: which one a resume takes, and what is set aside before it."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoints import flip, save
from zero.checkpoint import folder as folders
from zero.checkpoint.folder import find_resumable
from zero.checkpoint.manifest import DamagedCheckpointError

DATA = "rank00000.safetensors"


def trainers(output_dir: Path, number: int, ranks: int = 1, **manifest: object) -> Path:
    """Write the files that a Trainer's save leaves."""
    folder = output_dir / f"checkpoint-{number}"
    save(folder, f"global_step{number}", number, world_size=ranks, **manifest)
    torch.save({"last_epoch": 1}, folder / "scheduler.pt")
    suffixes = [""] if ranks == 1 else [f"_{rank}" for rank in range(ranks)]
    for name in (f"rng_state{suffix}.pth" for suffix in suffixes):
        torch.save({"cpu": torch.get_rng_state()}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": number}))
    return folder


TRAINER_DAMAGE = {
    "missing": lambda path: path.unlink(),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "flipped": flip,
    "a list": lambda path: path.write_text("[]"),
}


@pytest.mark.parametrize(
    "name", ["trainer_state.json", "scheduler.pt", "rng_state.pth", f"global_step10/{DATA}"]
)
@pytest.mark.parametrize("damage", TRAINER_DAMAGE)
def test_the_folder_to_resume_from_is_complete_and_intact(name, damage, tmp_path, caplog):
    good, damaged = trainers(tmp_path, 5), trainers(tmp_path, 10)
    assert find_resumable(tmp_path) == damaged and caplog.text == ""
    TRAINER_DAMAGE[damage](damaged / name)
    assert find_resumable(tmp_path) == good
    assert len(caplog.records) == 1 and str(damaged / name) in caplog.text


def test_every_rank_needs_its_random_states(tmp_path, monkeypatch):
    good, damaged = trainers(tmp_path, 5, ranks=2), trainers(tmp_path, 10, ranks=2)
    (damaged / "rng_state_1.pth").unlink()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find_resumable(tmp_path) == good
    monkeypatch.setenv("WORLD_SIZE", "3")  # they are needed only for the same number of ranks
    assert find_resumable(tmp_path) == damaged
    assert find_resumable(tmp_path / "nowhere") is None


def test_the_files_of_the_trainer_are_synced_once_after_the_last_one(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    folders.sync_later(tmp_path / "checkpoint-10")
    folder = trainers(tmp_path, 10)
    files = {*folder.glob("*.pt*"), *folder.glob("latest")}
    state = (folder / "trainer_state.json").rename(folder / "aside")
    monkeypatch.setattr(os, "fsync", recorded)
    folders.sync()
    assert not synced
    last = state.rename(folder / "trainer_state.json")
    for _ in range(3):
        folders.sync()
    assert sorted(synced) == sorted({*files, last, folder, tmp_path})


def test_the_newest_is_set_aside_until_it_is_complete(tmp_path, capsys):
    good, half, cut = trainers(tmp_path, 5), tmp_path / "checkpoint-15", trainers(tmp_path, 10)
    half.mkdir()
    (cut / "scheduler.pt").unlink()
    (trainers(tmp_path, 2) / "trainer_state.json").unlink()  # so no resume would take it
    folders.set_incomplete_aside(tmp_path)
    first, second = capsys.readouterr().err.splitlines()
    assert "trainer_state.json is missing" in first and "scheduler.pt is missing" in second
    half.mkdir()
    folders.set_incomplete_aside(tmp_path)
    assert good.is_dir()
    assert {path.name for path in tmp_path.iterdir() if path.name[0] != "."} == {
        *("checkpoint-2", "checkpoint-5", "incomplete-checkpoint-10", "incomplete-checkpoint-15"),
        "incomplete-checkpoint-15-again",
    }


def test_a_model_without_a_checkpoint_of_the_engine_is_left_alone(tmp_path):
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 10}')
    folders.set_incomplete_aside(tmp_path)
    assert folder.is_dir()
    folders.abandon(folders.begin(folder, "global_step10", 0))  # an asynchronous save has failed
    folders.set_incomplete_aside(tmp_path)
    assert not folder.exists()


def test_a_folder_named_by_the_script_is_checked_and_another_one_offered(tmp_path):
    good, damaged = trainers(tmp_path, 5), trainers(tmp_path, 10)
    folders.check_named(damaged)
    (damaged / "trainer_state.json").write_text("[]")
    said = rf"trainer_state.json is damaged.*intact checkpoint is {good}$"
    with pytest.raises(DamagedCheckpointError, match=said):
        folders.check_named(damaged)
    copied = damaged.rename(tmp_path / "best")  # the name does not tell its step
    folders.check_named(copied)
    (copied / "trainer_state.json").write_text(json.dumps({"global_step": 10}))
    folders.check_resumable(copied, world_size=1)


def test_the_first_save_cleans_up_for_what_the_trainer_deletes(tmp_path, monkeypatch, capsys):
    """A run was killed in save 20, and while the Trainer deleted `checkpoint-5`, which so has the
    newest time.
    """
    monkeypatch.setattr(folders, "_saved_here", set())
    old, good, newer, later = (trainers(tmp_path, step) for step in (5, 10, 20, 25))
    now = time.time()
    for folder, age in ((good, 50), (newer, 40), (later, 30), (old, 20)):
        os.utime(folder, (now - age, now - age))
    (newer / "scheduler.pt").unlink()
    (tmp_path / "checkpoint-15").mkdir()
    folders.sync_later(tmp_path / "checkpoint-15")
    by_time = sorted(tmp_path.glob("*checkpoint-*"), key=lambda path: path.stat().st_mtime)
    assert [path.name for path in by_time if path.name != "incomplete-checkpoint-20"] == [
        "checkpoint-5", "checkpoint-10", "checkpoint-25", "checkpoint-15"
    ]  # fmt: skip
    assert "incomplete-checkpoint-20" in capsys.readouterr().err and later.is_dir()
    monkeypatch.setattr(folders, "to_sync", None)


def test_an_incomplete_folder_that_no_rank_sets_aside_is_not_taken(tmp_path, monkeypatch):
    """As on another machine than rank 0's, without a shared file system."""
    trainers(tmp_path, 5)
    (tmp_path / "checkpoint-10").mkdir()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="checkpoint-10 is incomplete .*shared file system"):
        folders.set_incomplete_aside(tmp_path, wait=0.0)
