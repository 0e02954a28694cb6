"""Folders of checkpoints: a crash at any system call leaves one that loads, and damage is found and named."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections import namedtuple
from pathlib import Path

import pytest

from zero.checkpoint import folder as folders


def save(save_dir: Path, tag: str, content: bytes = b"weights", latest: bool = True) -> Path:
    """What `save_checkpoint` does on disk, with one small file."""
    folder = folders.begin(save_dir, tag, len(content))
    (folder / "data").write_bytes(content)
    description = {
        "format": folders.FORMAT,
        "version": folders.FORMAT_VERSION,
        "files": {"data": {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}},
        "nested": {"a": 1, "b": [1.5]},
    }
    folders.commit(folder, tag, description, latest=latest)
    return save_dir / tag


def load(load_dir: Path, tag: str | None = None) -> bytes:
    folder = folders.locate(load_dir, tag)
    folders.verify(folder, folders.read_description(folder)["files"].items())
    return (folder / "data").read_bytes()


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


class Crash(BaseException):
    """The process ends here: no handler of the program sees it."""


class CrashAt:
    """Lets `survived` more system calls that change the disk happen; the next one ends the process instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, survived: int):
        self.left = survived
        for owner, name in (
            (os, "fsync"),
            (os, "mkdir"),
            (os, "rename"),
            (os, "replace"),
            (os, "unlink"),
            (os, "rmdir"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function):
        def call(*args, **kwargs):
            if self.left == 0:
                raise Crash
            self.left -= 1
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("tag", ["global_step2", "global_step1"], ids=["new", "replacing"])
def test_a_crash_at_any_system_call_leaves_a_checkpoint_that_loads(tag, tmp_path, monkeypatch):
    seen = set()
    for survived in range(100):
        folder = tmp_path / str(survived)
        save(folder, "global_step1", b"old")
        with monkeypatch.context() as patch:
            crash = CrashAt(patch, survived)
            try:
                save(folder, tag, b"new")
                finished = True
            except Crash:
                finished = False
            crash.left = 1000
        content = load(folder)
        assert content in ((b"new",) if finished else (b"old", b"new"))
        seen.add(content)
        # The next save cleans up, and loses nothing on the way.
        save(folder, "global_step3", b"next")
        assert load(folder) == b"next" and hidden(folder) == []
        assert load(folder, "global_step1") in ((b"old",) if tag == "global_step2" else (b"old", b"new"))
        if finished:
            assert survived >= 8 and seen == {b"old", b"new"}
            return
    raise AssertionError("the save never finished")


def test_latest_changes_last_and_only_when_asked(tmp_path):
    save(tmp_path, "global_step1", b"1")
    save(tmp_path, "probe", b"p", latest=False)
    assert load(tmp_path) == b"1" and load(tmp_path, "probe") == b"p"


def test_without_a_pointer_the_highest_number_is_newest(tmp_path):
    for number in (9, 10):
        save(tmp_path, f"global_step{number}", str(number).encode())
    (tmp_path / "latest").unlink()
    assert load(tmp_path) == b"10"
    assert folders.locate(tmp_path / "global_step9", None) == tmp_path / "global_step9"
    assert folders.locate(tmp_path / "nowhere", None) is None


def test_too_little_space_is_an_error_before_the_first_byte(tmp_path, monkeypatch):
    save(tmp_path, "global_step1")
    before = sorted(path for path in tmp_path.rglob("*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(100, 90, 10))
    with pytest.raises(OSError, match="takes 1,024.0 MiB and 0.0 MiB are free") as caught:
        folders.begin(tmp_path, "global_step2", 2**30)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_files_that_went_to_another_disk_are_noticed(tmp_path):
    folder = folders.begin(tmp_path, "global_step1", 0)
    with pytest.raises(OSError, match="same file system"):
        folders.commit(folder, "global_step1", {"files": {"__1_0.distcp": {"bytes": 3}}}, latest=True)
    assert folders.locate(tmp_path, None) is None


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "/tmp/a", ".hidden", "latest"])
def test_tags_that_are_no_folder_names(tag):
    with pytest.raises(ValueError, match="tag"):
        folders.check_tag(tag)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped": (lambda folder: flip(folder / "data"), "data is damaged: its checksum"),
    "truncated": (lambda folder: os.truncate(folder / "data", 3), "data is damaged: 3 bytes, 7 were written"),
    "missing": (lambda folder: (folder / "data").unlink(), "data is missing"),
    "description flipped": (lambda folder: flip(folder / folders.DESCRIPTION), "checkpoint.json is damaged"),
    "description truncated": (
        lambda folder: os.truncate(folder / folders.DESCRIPTION, 40),
        "checkpoint.json is damaged",
    ),
    "description missing": (lambda folder: (folder / folders.DESCRIPTION).unlink(), "checkpoint.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named(damage, tmp_path):
    inflict, message = DAMAGE[damage]
    save(tmp_path, "global_step1")
    inflict(save(tmp_path, "global_step2"))
    with pytest.raises(folders.DamagedCheckpointError, match=message):
        load(tmp_path)
    assert folders.find_intact(tmp_path) == tmp_path / "global_step1"
    assert folders.offer(tmp_path / "global_step2").endswith(str(tmp_path / "global_step1"))


def test_every_flipped_byte_of_the_description_is_noticed(tmp_path):
    path = save(tmp_path, "global_step1") / folders.DESCRIPTION
    content = path.read_bytes()
    for position, byte in enumerate(content):
        if chr(byte).isspace():
            continue
        path.write_bytes(content[:position] + bytes([byte ^ 1]) + content[position + 1 :])
        with pytest.raises(ValueError, match="checkpoint.json"):
            folders.read_description(path.parent)


def test_offers_come_from_the_trainers_folders_and_are_earlier(tmp_path):
    for number in (5, 10, 15, 20):
        save(tmp_path / f"checkpoint-{number}", f"global_step{number}")
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text("{}")
    flip(tmp_path / "checkpoint-10" / "global_step10" / "data")
    damaged = tmp_path / "checkpoint-15" / "global_step15"
    flip(damaged / "data")
    assert folders.offer(damaged).endswith(f"is {tmp_path / 'checkpoint-5'}")
    assert folders.find_intact(tmp_path) == tmp_path / "checkpoint-20" / "global_step20"
    assert "no earlier" in folders.offer(tmp_path / "checkpoint-5" / "global_step5")


def test_the_folder_to_resume_from_is_complete_and_intact(tmp_path):
    for number in (5, 10, 15, 20):
        save(tmp_path / f"checkpoint-{number}", f"global_step{number}")
        if number < 20:  # the run was killed before the Trainer wrote its own state
            (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text("{}" if number < 15 else '{"a')
    save(tmp_path, "global_step30")
    assert folders.find_resumable(tmp_path) == tmp_path / "checkpoint-10"
    flip(tmp_path / "checkpoint-10" / "global_step10" / "data")
    assert folders.find_resumable(tmp_path) == tmp_path / "checkpoint-5"
    assert folders.find_resumable(tmp_path / "nowhere") is None


def test_a_newer_format_is_not_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "FORMAT_VERSION", 2)
    save(tmp_path, "global_step1")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 2, this program reads 1"):
        load(tmp_path)
