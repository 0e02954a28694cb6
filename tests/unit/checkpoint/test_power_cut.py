"""A save is durable before it is visible. So after a kill or a power cut at any moment, a
checkpoint on the disk loads.

The system calls of a save are recorded. They are replayed on a model of a disk, up to each of them.
The model loses changes that were not synchronised: all of them, none (as after a kill), or a random
part. That part is some bytes of a file, or the last changes of a folder."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.unit.checkpoints import load, save
from zero.checkpoint import disk

Keep = Callable[[int, int], int]


@dataclass
class File:
    """The content at the last synchronisation, and the `writes` since then."""

    durable: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list)

    def sync(self) -> None:
        self.durable = self.after(len(self.writes))
        self.writes = []

    def after(self, count: int) -> bytes:
        content = bytearray(self.durable)
        for position, data in self.writes[:count]:
            content.extend(b"\0" * (position + len(data) - len(content)))
            content[position : position + len(data)] = data
        return bytes(content)


@dataclass
class Folder:
    """The entries, and their `changes` since the last synchronisation: rename, remove (to None),
    add (from None).
    """

    durable: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def after(self, count: int) -> dict[str, File | Folder]:
        entries = dict(self.durable)
        for change in self.changes[:count]:
            entries |= change
        return {name: entry for name, entry in entries.items() if entry is not None}

    def sync(self) -> None:
        self.durable = self.after(len(self.changes))
        self.changes = []

    def restore(self, place: Path, keep: Keep) -> None:
        """Write what is there when the power is back.

        `keep(from, to)` says how many changes survived.
        """
        place.mkdir()
        for name, entry in self.after(keep(0, len(self.changes))).items():
            if isinstance(entry, Folder):
                entry.restore(place / name, keep)
            else:
                (place / name).write_bytes(entry.after(keep(0, len(entry.writes))))


class Disk:
    """A model of the disk under `root`. Recorded system calls are applied to it."""

    def __init__(self, root: Path):
        self.root = root
        self.top = self._durable(root)

    def _durable(self, path: Path) -> Folder:
        files = {each.name: each for each in path.iterdir()}
        return Folder(
            {n: self._durable(e) if e.is_dir() else File(e.read_bytes()) for n, e in files.items()}
        )

    def find(self, path: str | Path) -> File | Folder:
        found = self.top
        for part in Path(path).relative_to(self.root).parts:
            found = found.after(len(found.changes))[part]
        return found

    def _change(self, path: str | Path, **entry: File | Folder | None) -> None:
        self.find(Path(path).parent).changes.append(entry)

    def apply(self, call: str, *arguments) -> None:
        match call, *arguments:
            case "create", path:
                self._change(path, **{Path(path).name: File()})
            case "mkdir", path:
                self._change(path, **{Path(path).name: Folder()})
            case "write", path, position, data:
                self.find(path).writes.append((position, data))
            case "rename", source, target:
                old, new = Path(source), Path(target)
                moved, removed = {new.name: self.find(old)}, {old.name: None}
                if old.parent == new.parent:
                    self._change(new, **moved | removed)
                else:  # what lies beside a checkpoint moves to the one that replaces it
                    self._change(new, **moved)
                    self._change(old, **removed)
            case "remove", path:
                self._change(path, **{Path(path).name: None})
            case "sync", path:
                self.find(path).sync()


REMOVALS, RENAMES = ("unlink", "rmdir"), ("rename", "replace")


class Recorder:
    """Records the calls that change files under `root`."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path):
        self.calls: list[tuple] = []
        self._root = root
        self._paths = {}
        for name in ("open", "pwrite", "fsync", "fdatasync", "mkdir", *REMOVALS, *RENAMES):
            patch.setattr(os, name, partial(self._record, name, getattr(os, name)))
        patch.setattr(shutil, "rmtree", self._rmtree)

    def _rmtree(self, path: Path, ignore_errors: bool = False) -> None:
        for entry in sorted(Path(path).iterdir()):
            self._rmtree(entry) if entry.is_dir() else os.unlink(entry)
        os.rmdir(path)

    def _record(self, name: str, function: Callable, *args, **kwargs):
        new = name == "open" and not os.path.exists(args[0])
        result = function(*args, **kwargs)
        if name == "open":
            self._paths[result] = str(args[0])
            if new:
                self._note("create", args[0])
        elif name == "pwrite":
            self._note("write", self._paths[args[0]], args[2], bytes(args[1][:result]))
        elif name in ("fsync", "fdatasync"):
            self._note("sync", self._paths[args[0]])
        elif name in RENAMES:
            self._note("rename", args[0], str(args[1]))
        else:
            self._note("remove" if name in REMOVALS else name, args[0])
        return result

    def _note(self, call: str, path: str | Path, *rest) -> None:
        if Path(path).is_relative_to(self._root) and Path(path).name != disk.LOCK:
            self.calls.append((call, str(path), *rest))


# What lies beside a checkpoint in its folder.
OTHERS = ("tokenizer.json", "tokenizer/merges.txt")
KEEPS: dict[str, Keep] = {"nothing": lambda a, b: a, "everything": lambda a, b: b}
KEEPS |= {f"chance {seed}": random.Random(seed).randint for seed in range(4)}


@pytest.mark.parametrize("tag", ["global_step2", "global_step1"], ids=["new", "replacing"])
def test_whenever_a_save_ends_what_is_there_loads(tag, tmp_path, monkeypatch):
    """Save `tag` after global_step1. Load what a power cut leaves after each call."""
    root = tmp_path / "disk"
    first, stale = root / "checkpoints" / "global_step1", "global_step1/rank00003.safetensors"
    (first / "tokenizer").mkdir(parents=True)
    for name in OTHERS:
        (first / name).write_text("precious")
    save(root / "checkpoints", "global_step1", 1)
    (root / "checkpoints" / stale).write_text("of a save by more ranks")
    before = Disk(root)
    with monkeypatch.context() as patch:
        recorder = Recorder(patch, root)
        save(root / "checkpoints", tag, 2)
    calls = recorder.calls
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the real disk need not be synced
    seen = set()
    for count in range(len(calls) + 1):
        for name, keep in KEEPS.items():
            model = deepcopy(before)
            for call in calls[:count]:
                model.apply(*call)
            place = tmp_path / f"{count}-{name}"
            model.top.restore(place, keep)
            folder = place / "checkpoints"
            found = load(folder)
            assert found == 2 or count < len(calls), name
            seen.add(found)
            # The next save cleans up and loses nothing.
            save(folder, "global_step3", 3)
            assert load(folder) == 3
            kept = load(folder, "global_step1")
            assert kept in (1, 2)
            if name == "everything":
                assert not [path for path in folder.glob(".*") if path.name != disk.LOCK]
                assert kept == 1 or tag == "global_step1"
                assert (folder / stale).exists() == (kept == 1)
                for other in OTHERS:
                    assert (folder / "global_step1" / other).read_text() == "precious"
            shutil.rmtree(place)
    assert seen == {1, 2} and len(calls) > 20
