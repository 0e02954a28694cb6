"""Folders of checkpoints: damage is found and named, and what others have there stays."""

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.checkpoints import flip, load, save
from zero.checkpoint import disk
from zero.checkpoint import folder as folders
from zero.checkpoint import manifest as manifests
from zero.checkpoint.blocks import verify
from zero.checkpoint.files import TensorSpec, open_checkpoint
from zero.checkpoint.folder import find_intact, offer
from zero.checkpoint.manifest import MANIFEST, DamagedCheckpointError, read_manifest
from zero.checkpoint.models import get_fp32_state_dict_from_zero_checkpoint, write_model
from zero.errors import UsageError
from zero.tools.cli import main

DATA = "rank00000.safetensors"


def test_a_file_of_the_tags_name_is_left_alone(tmp_path):
    (tmp_path / "step_1").write_text("precious")
    (tmp_path / "step_2").symlink_to(tmp_path / "nowhere")
    for name in ("step_1", "step_2"):
        with pytest.raises(UsageError, match=f"{name} is no folder"):
            folders.begin(tmp_path, name, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"step_1", "step_2"}


def test_without_a_pointer_the_highest_number_is_newest(tmp_path):
    for number in (9, 10):
        save(tmp_path, f"global_step{number}", number)
    (tmp_path / "latest").unlink()
    assert load(tmp_path) == 10
    assert folders.locate(tmp_path / "global_step9", None) == tmp_path / "global_step9"
    assert folders.locate(tmp_path / "nowhere", None) is None


def test_too_little_space_is_an_error_before_the_first_byte(tmp_path, monkeypatch):
    save(tmp_path, "global_step1")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(OSError, match="takes 1 GiB and 10 B are free") as caught:
        folders.begin(tmp_path, "global_step2", 2**30)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(tmp_path.rglob("*")) == before


def test_files_that_went_to_another_disk_are_noticed(tmp_path):
    folder = folders.begin(tmp_path, "global_step1", 0)
    manifest = {"files": {"rank00001.safetensors": {"bytes": 3}}}
    with pytest.raises(OSError, match="same file system"):
        folders.commit(folder, "global_step1", manifest, latest=True)
    assert folders.locate(tmp_path, None) is None


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "/tmp/a", ".hidden", "latest", "a\0b"])
def test_tags_that_are_no_folder_names(tag):
    with pytest.raises(UsageError, match="tag"):
        folders.check_tag(tag)


def become_link(path: Path) -> None:
    """Replace a file by a link to an equal file outside of the folder."""
    path.rename(path.parents[2] / "outside")
    path.symlink_to(path.parents[2] / "outside")


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "flipped": (DATA, flip, "is damaged: its checksum"),
    "truncated": (DATA, lambda path: os.truncate(path, 3), "is damaged: 3 bytes, "),
    "missing": (DATA, Path.unlink, "is missing"),
    "a link": (DATA, become_link, "is damaged: it cannot be opened"),
    "a pipe": (DATA, become_pipe, "is damaged: .* not a regular file"),
    "manifest flipped": (MANIFEST, flip, "is damaged"),
    "manifest truncated": (MANIFEST, lambda path: os.truncate(path, 40), "is damaged"),
    "manifest missing": (MANIFEST, Path.unlink, "is missing"),
    "manifest a pipe": (MANIFEST, become_pipe, ".*not a regular file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named(damage, tmp_path):
    name, inflict, message = DAMAGE[damage]
    folder = tmp_path / "a"
    save(folder, "global_step1")
    inflict(save(folder, "global_step2") / name)
    with pytest.raises(DamagedCheckpointError, match=f"{name} {message}"):
        load(folder)
    assert find_intact(folder) == folder / "global_step1"
    assert offer(folder / "global_step2").endswith(str(folder / "global_step1"))


def test_every_flipped_byte_of_the_description_is_noticed(tmp_path):
    path = save(tmp_path, "global_step1") / MANIFEST
    content = path.read_bytes()
    for position, byte in enumerate(content):
        if chr(byte).isspace():
            continue
        path.write_bytes(content[:position] + bytes([byte ^ 1]) + content[position + 1 :])
        with pytest.raises(ValueError, match="checkpoint.json"):
            read_manifest(path.parent)


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_not_damage(version, tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "FORMAT_VERSION", version)
    save(tmp_path, "global_step1", version=version)
    monkeypatch.undo()
    message = f"format version {version}, this version reads only 2; resume from it"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


# -- hostile folders


def forge(folder: Path, change) -> None:
    """Change the manifest as an attacker would who knows the format: with a correct checksum."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["checksum"]
    change(content)
    (folder / MANIFEST).write_text(manifests.to_text(content))


def outside(content: dict) -> None:
    content["files"]["../../outside"] = content["files"].pop(DATA)
    content["tensors"]["weights/w"]["slices"][0][2] = "../../outside"


def beyond(content: dict) -> None:
    content["tensors"]["weights/w"]["slices"][0][3] = 2**40


def stored(**entry: object) -> Callable[[dict], None]:
    return lambda content: content["tensors"]["weights/w"].update(entry)


def used(**entry: object) -> Callable[[dict], None]:
    parameter = {"shape": [4], "dtype": "float32"} | entry
    return lambda content: content.update(parameters={"w": parameter})


FORGERIES = {
    "a path": (outside, "files"),
    "a place beyond the end": (beyond, "no such place"),
    "a hole": (stored(numel=5), "of 5 elements are there"),
    "a dtype": (stored(dtype="nn"), "unknown dtype"),
    "another dtype": (stored(dtype="int32"), f"{DATA} has tensors of other sizes or dtypes"),
    "a quantized dtype": (stored(dtype="quint4x2"), "unknown dtype"),
    "the dtype of use": (used(dtype="int32"), "used as int32"),
    "no parts": (used(cut=[0, 1, 0]), "cannot be in the parts"),
    "endless parts": (used(cut=[0, 1, 2**40]), "cannot be in the parts"),
    "a param group": (used(cut=[0, 1, 1], group=3), "no param group 3"),
    "a shape": (used(shape=["x"]), "parameters.w"),
    "nothing": (dict.clear, "format"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest_is_refused_by_name(forgery, tmp_path):
    change, message = FORGERIES[forgery]
    folder = save(tmp_path, "global_step1")
    forge(folder, change)
    with pytest.raises(DamagedCheckpointError, match=f"checkpoint.json is damaged: .*{message}"):
        verify(folder, open_checkpoint(folder).manifest)


class Planted:
    def __reduce__(self):
        return os.mkdir, (Planted.place,)


def test_no_file_of_a_checkpoint_is_executed(tmp_path, capsys):
    """Every file is a pickle that would run when it is read. Every reader of checkpoints refuses
    it.
    """
    Planted.place = str(tmp_path / "executed")
    folder = save(tmp_path / "checkpoints", "global_step1")
    for path in [*folder.iterdir(), folder / ".metadata"]:
        path.write_bytes(pickle.dumps(Planted()))
    for words in (["inspect", folder], ["inspect", folder.parent], ["consolidate", folder, "out"]):
        with pytest.raises(SystemExit):
            main([*map(str, words)])
        assert "checkpoint.json is damaged" in capsys.readouterr().err
    with pytest.raises(DamagedCheckpointError):
        get_fp32_state_dict_from_zero_checkpoint(folder)
    assert not Path(Planted.place).exists()


def test_nothing_in_the_package_unpickles():
    words = r"pickle\.load|Unpickler|torch\.load\(|weights_only|marshal|shelve|from pickle"
    package = Path(folders.__file__).parents[1]
    files = [(path.name, path.read_text()) for path in package.rglob("*.py")]
    assert {(name, word) for name, text in files for word in re.findall(words, text)} == {
        # Recordings of the same command, by torch's restricted unpickler.
        ("compare.py", "torch.load("),
        # The ranks of a job trust each other, as in torch's own `all_gather_object`.
        ("control.py", "pickle.load"),
        # Its subclass has no instruction that imports or calls
        # (tests/unit/conversion/test_pickles.py).
        ("pickles.py", "Unpickler"),
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *product(["link", "file"], ["zero_to_fp32.py", "latest", ".saving-x", ".replaced-y"]),
        *product(["folder"], [".saving-x", ".replaced-y"]),
    ],
)
def test_what_lies_in_the_way_of_a_save(kind, name, tmp_path):
    precious, folder = tmp_path / "precious", tmp_path / "checkpoints"
    precious.write_text("precious")
    folder.mkdir()
    if kind == "link":
        (folder / name).symlink_to(precious)
    else:
        (Path.touch if kind == "file" else Path.mkdir)(folder / name)
    save(folder, "global_step1", 5)
    assert load(folder) == 5 and precious.read_text() == "precious"
    assert not (folder / "zero_to_fp32.py").is_symlink()


def test_a_flipped_byte_of_the_pointer_is_named_and_a_checkpoint_offered(tmp_path):
    for number in (11, 12):
        save(tmp_path, f"global_step{number}", number)
    pointer = tmp_path / "latest"
    content = pointer.read_bytes()
    for position, byte in enumerate(content):
        before, after = content[:position], content[position + 1 :]
        pointer.write_bytes(before + bytes([byte ^ 0x84]) + after)
        with pytest.raises(ValueError, match="latest is damaged") as caught:
            folders.locate_tag(tmp_path, None)
        assert str(caught.value).endswith(f"checkpoint is {tmp_path / 'global_step12'}")
        pointer.write_bytes(before + bytes([byte ^ 1]) + after)  # a name that may be a folder's
        if pointer.read_bytes() != b"global_step13":
            with pytest.raises(ValueError, match="latest is damaged|no checkpoint"):
                folders.locate_tag(tmp_path, None)


def test_a_model_is_not_written_through_planted_links(tmp_path):
    precious, out = tmp_path / "precious", tmp_path / "out"
    precious.write_text("precious")
    out.mkdir()
    names = ("model.safetensors", ".model.safetensors", "config.json")
    for name in names:
        (out / name).symlink_to(precious)
    tensor = torch.arange(4.0)
    write_model(out, [TensorSpec("w", tensor.shape, tensor.dtype)], iter([tensor]), {"a": 1})
    assert precious.read_text() == "precious"
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert not any(path.is_symlink() for path in out.iterdir())
    assert torch.equal(load_file(out / "model.safetensors")["w"], tensor)


# -- two jobs


def test_a_job_that_saves_to_many_folders_keeps_few_locks_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3 * disk.MOST_LOCKS):
        save(tmp_path / str(number), "global_step1")
        save(tmp_path / "often", "global_step1")
    assert len(os.listdir("/proc/self/fd")) <= before + disk.MOST_LOCKS
    if (pid := os.fork()) == 0:  # the folder that is still in use is locked
        with contextlib.suppress(UsageError):
            disk.lock(tmp_path / "often")
            os._exit(0)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


@contextlib.contextmanager
def other_job(folder: Path) -> Iterator[int]:
    """A job that holds the lock of `folder`, by its process id. At last it is killed."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        disk.lock(folder)
        os.write(writer, b"has it")
        while True:
            time.sleep(1)
    assert os.read(reader, 6) == b"has it"
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_job_is_refused_and_a_dead_one_is_not_in_the_way(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    with other_job(tmp_path) as pid:
        said = rf"{tmp_path}.*another job \(host .*, process {pid}, since 20"
        with pytest.raises(UsageError, match=said):
            save(tmp_path, "global_step1")
        with pytest.raises(UsageError, match="in use"):
            save(tmp_path / "checkpoint-5", "global_step5")
        folders.set_incomplete_aside(tmp_path)
        assert (tmp_path / "checkpoint-5").is_dir()
    save(tmp_path, "global_step1")
    save(tmp_path, "probe", 7, latest=False)
    assert load(tmp_path) == 1 and load(tmp_path, "probe") == 7


def test_a_fork_does_not_keep_the_lock(tmp_path):
    """A forked worker that loads data may outlive a job that was killed."""
    ready, begun = os.pipe()
    if os.fork() == 0:
        disk.lock(tmp_path)
        if os.fork() == 0:
            os.write(begun, b"x")
            time.sleep(60)
        os._exit(0)
    os.wait()
    os.read(ready, 1)  # the worker has begun, so it has let the lock go
    disk.lock(tmp_path)


def test_saves_under_way_in_one_folder_leave_each_other_alone(tmp_path):
    saves = [folders.begin(tmp_path, tag, 0) for tag in ("a1", "a1", "a2")]
    assert all(folder.is_dir() for folder in saves)
    for folder in saves:
        folders.abandon(folder)
