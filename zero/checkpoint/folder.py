"""Checkpoint folders on disk, which become visible by a single rename and are found again after a
crash: those with correct checksums, and the Trainer's folders that are complete.

[Note: life of a checkpoint folder]
    .saving-TAG-X   being written; readers ignore it. The next save removes it if it is left over.
    TAG             complete: `checkpoint.json` is in it, and every file that it lists was synced
                    before the rename
    .replaced-TAG   the former TAG, between two renames, if a checkpoint of that name existed.
                    After a crash between these renames it is read in place of TAG, and the next
                    save restores it. Files in it that no save has written move to the new TAG.
    latest          a file with the newest TAG; changes last, and by a rename of its own
    .zero-lock      held as long as the job lives: in the folder of the checkpoints, or the one
                    around `checkpoint-N`

Names that begin with a dot are private to this module. Nothing here touches a process group or a
tensor.

[Note: the Trainer's folders] The Trainer fills `checkpoint-N` in its own order: the model, the
engine's checkpoint, `scheduler.pt`, random states of each rank, `trainer_state.json`. It does not
signal when it has finished, and does not sync its files. A later step, save or exit therefore syncs
them. A folder is complete if every file exists and is whole, as far as this can be seen from the
file's own format.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zero.checkpoint import disk
from zero.checkpoint.blocks import check_files, verify
from zero.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    damaged,
    read_manifest,
    to_text,
)
from zero.errors import UsageError

logger = logging.getLogger("zero")

LATEST = "latest"
MODEL_FILE = "mp_rank_00_model_states.pt"  # of DeepSpeed
TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
# What the Trainer writes without syncing it.
_WRITTEN_LAST = ("rng_state*.pth", "*.pt", TRAINER_STATE, LATEST)
_REPLACED = ".replaced-"
_OF_TRAINER = re.compile(r"checkpoint-\d+")
# The names of the files that saves write to a checkpoint's folder, or did in earlier versions.
_WRITTEN = re.compile(
    r"checkpoint\.json|rank\d+\.safetensors|(zero_pp_rank_\d+_)?mp_rank_00_model_states\.pt"
    r"|bf16_zero_pp_rank_\d+_mp_rank_00_optim_states\.pt"
)
# Names of folders that this process is writing; the lock for renaming and removing.
_writing: set[str] = set()
_turn = threading.Lock()


# -- writing


def check_tag(tag: str) -> str:
    """Return the tag if it can be the name of a folder, or else raise UsageError."""
    if not tag or tag.startswith(".") or tag == LATEST or Path(tag).name != tag or "\0" in tag:
        raise UsageError(f"tag {tag!r}: must be a plain folder name that does not begin with a dot")
    return tag


RECOVERY_SCRIPT = "zero_to_fp32.py"
_RECOVERY = '''#!/usr/bin/env python
"""python zero_to_fp32.py CHECKPOINT OUT makes a folder with fp32 weights, as DeepSpeed's script of
this name does, and takes its options."""
import sys

try:
    from zero.__main__ import main
except ModuleNotFoundError as error:
    sys.exit(f"zero_to_fp32.py: {error}: install zero here, or set PYTHONPATH to a checkout of it")
main(["consolidate", *sys.argv[1:], "--dtype", "fp32"])
'''


def job_folder(save_dir: Path) -> Path:
    """Return the folder that belongs to one job.

    Inside it, the Trainer makes a folder for each checkpoint.
    """
    return save_dir.parent if _OF_TRAINER.fullmatch(save_dir.name) else save_dir


def begin(save_dir: Path, tag: str, nbytes: int) -> Path:
    """Clean up after killed saves, check that `nbytes` fit, and make the folder to write to.

    Raises:
        OSError: the folder cannot be written to, or does not have enough space. Nothing has been
            written in this case.
        UsageError: another job writes to it, or `tag` names something that is not a folder.
    """
    if os.path.lexists(save_dir / tag) and not (save_dir / tag).is_dir():
        raise UsageError(f"{save_dir / tag} is no folder: move it, or save with another tag")
    disk.make_folders(save_dir)
    disk.lock(job_folder(save_dir))
    with _turn:
        _remove_leftovers(save_dir)
    disk.require_room(save_dir, nbytes, "a checkpoint")
    disk.replace_text(save_dir / RECOVERY_SCRIPT, _RECOVERY, 0o777)
    folder = disk.unfinished(save_dir / tag)
    _writing.add(folder.name)
    folder.mkdir()
    return folder


def _remove_leftovers(save_dir: Path) -> None:
    """Remove what killed saves left behind, and restore a checkpoint whose replacement is
    missing.
    """
    for replaced in save_dir.glob(f"{_REPLACED}*"):
        original = save_dir / replaced.name.removeprefix(_REPLACED)
        if original.is_dir():
            _remove_replaced(replaced, original)
        elif not os.path.lexists(original):
            replaced.rename(original)
    for saving in save_dir.glob(f"{disk.UNFINISHED}*"):
        if saving.name not in _writing:
            disk.remove(saving)


def _remove_replaced(replaced: Path, target: Path) -> None:
    """Remove the checkpoint in `replaced`, which `target` has replaced.

    Other files in that folder, such as a tokenizer's, move to `target`. After a crash in the
    middle, another call does the rest.
    """
    if replaced.is_dir() and not replaced.is_symlink():
        # The manifest is removed last, because it marks the other files as those of a checkpoint.
        paths = sorted(replaced.iterdir(), key=lambda path: path.name == MANIFEST)
        was_checkpoint = (replaced / MANIFEST).exists()
        for path in paths:
            if was_checkpoint and _WRITTEN.fullmatch(path.name):
                disk.remove(path)
            elif not os.path.lexists(target / path.name):
                path.rename(target / path.name)
        disk.sync(target)
    disk.remove(replaced)


def commit(folder: Path, tag: str, manifest: dict, *, latest: bool) -> None:
    """Write the manifest, and rename the folder that `begin` returned to `tag`, which makes the
    checkpoint visible.
    """
    save_dir = folder.parent
    for name, entry in manifest["files"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != entry["bytes"]:
            raise OSError(
                f"{folder / name} is not what was written; do all ranks write to the same file "
                "system?"
            )
    disk.replace_text(folder / MANIFEST, to_text(manifest))
    target, replaced = save_dir / tag, save_dir / (_REPLACED + tag)
    with _turn:
        if target.exists():
            target.rename(replaced)
        folder.rename(target)
        disk.sync(save_dir)
        if latest:
            disk.replace_text(save_dir / LATEST, tag)
        _remove_replaced(replaced, target)
    _writing.discard(folder.name)


def abandon(folder: Path) -> None:
    """Remove the folder that `begin` returned.

    Errors are ignored: the next save removes the rest.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _writing.discard(folder.name)


# -- finding


def locate(load_dir: Path, tag: str | None) -> Path | None:
    """Find the folder of checkpoint `tag` in `load_dir`, or without a tag the latest one. Returns
    None if there is none.

    `load_dir` may be a checkpoint's own folder. Raises ValueError if there is no folder for the
    tag, given or from `latest`."""
    if tag is None and (load_dir / MANIFEST).is_file():
        return load_dir
    latest = load_dir / LATEST
    if tag is not None:
        return _folder_of(load_dir, tag)
    if not os.path.lexists(latest):
        return next(iter(newest_first([load_dir])), None)
    try:
        return _folder_of(load_dir, check_tag(disk.read(latest).decode().strip()))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{latest} is damaged: {error}; name the checkpoint's own folder"
        ) from None


def located(path: Path, tag: str | None = None) -> Path:
    """Like `locate`, but raises UsageError if there is no checkpoint."""
    folder = locate(path, tag)
    if folder is None:
        newest = next(iter(of_trainer(path)), "output/checkpoint-500")
        raise UsageError(f"{path}: there is no checkpoint; name its folder, such as {newest}")
    return folder


def locate_deepspeed(load_dir: Path, tag: str | None) -> Path | None:
    """Like `locate`, but finds the folder of a checkpoint that DeepSpeed has written."""
    folders = [] if tag is not None else [load_dir]
    if tag is None and (load_dir / LATEST).is_file():
        tag = disk.read(load_dir / LATEST).decode(errors="replace").strip()
    if tag is not None and Path(tag).name == tag:
        folders.append(load_dir / tag)
    return next(filter(_is_of_deepspeed, folders), None)


def _is_of_deepspeed(folder: Path) -> bool:
    # Checkpoints of earlier versions of zero also have files with these names.
    if (folder / MANIFEST).exists() or any(folder.glob("rank*.safetensors")):
        return False
    is_universal = (folder / "zero" / "optimizer_state.pt").is_file()
    return is_universal or any(folder.glob("*zero_pp_rank_*_optim_states.pt"))


def _folder_of(load_dir: Path, tag: str) -> Path:
    for folder in (load_dir / tag, load_dir / (_REPLACED + tag)):
        if folder.is_dir():
            return folder
    raise UsageError(f"{load_dir}: there is no checkpoint {tag!r}")


def newest_first(folders: Iterable[Path]) -> list[Path]:
    """Return checkpoints directly in `folders` that look complete, the highest number first."""
    found = {}
    for folder in folders:
        for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
            path = manifest.parent
            if not path.name.startswith(disk.UNFINISHED):
                # In this order a checkpoint comes after its replaced predecessor.
                found[path.with_name(path.name.removeprefix(_REPLACED))] = path
    order = sorted(found, key=lambda path: (number_of(path), path.name), reverse=True)
    return [found[path] for path in order]


def number_of(folder: Path) -> int:
    """Return the number at the end of a folder's name, or -1 if there is none."""
    digits = re.search(r"(\d+)$", folder.name)
    return int(digits[1]) if digits else -1


def of_trainer(output_dir: Path) -> list[Path]:
    """Return the Trainer's folders, `checkpoint-N`, the newest first."""
    paths = (path for path in output_dir.glob("checkpoint-*") if path.is_dir())
    found = [path for path in paths if _OF_TRAINER.fullmatch(path.name)]
    return sorted(found, key=number_of, reverse=True)


# -- finding those that are intact


def find_intact(folder: str | os.PathLike, before: Path | None = None) -> Path | None:
    """Return the newest checkpoint under `folder` in which all checksums are correct, or None.

    `folder` contains checkpoints (`global_stepN`), or the Trainer's folders (`checkpoint-N`) with
    one each. With `before`, a checkpoint's folder whose name has a number, only older ones count.
    """
    found = newest_first([Path(folder), *of_trainer(Path(folder))])
    if before is not None and number_of(before) >= 0:
        found = [each for each in found if number_of(each) < number_of(before)]
    return _first(lambda candidate: verify(candidate, _checked(candidate)), found)


def _checked(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files have their sizes."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest


def _first(check: Callable[[Path], None], candidates: Iterable[Path]) -> Path | None:
    """Return the first candidate for which `check` raises nothing.

    For each candidate before it, rank 0 logs the reason.
    """
    for candidate in candidates:
        try:
            check(candidate)
        except (ValueError, OSError) as error:
            if os.environ.get("RANK", "0") == "0":
                logger.warning("skipping %s: %s", candidate, error)
        else:
            return candidate
    return None


def locate_tag(load_dir: Path, tag: str | None) -> Path | None:
    """Like `locate`, but errors say which checkpoint to load instead."""
    try:
        return locate(load_dir, tag)
    except ValueError as error:
        raise UsageError(f"{error}{offer(load_dir / (tag or LATEST))}") from None


@contextmanager
def offering_another(folder: Path) -> Iterator[None]:
    """Context in which the error of a damaged checkpoint says which one to load instead."""
    try:
        yield
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error}{offer(folder)}") from error


def offer(damaged: Path) -> str:
    """Return the end of an error message, which says which checkpoint to load instead."""
    intact = find_intact(job_folder(damaged.parent), before=damaged)
    if intact is None:
        return "; there is no earlier intact checkpoint beside it"
    where = intact if intact.parent == damaged.parent else intact.parent
    return f"; the newest earlier intact checkpoint is {where}"


# -- the Trainer's folders


def check_resumable(folder: Path, world_size: int, sums: bool = True) -> None:
    """Check that a Trainer on `world_size` ranks can resume from `folder`. Without `sums`, slices
    are not read.

    Raises DamagedCheckpointError, which names a file that is missing or incomplete.
    """
    _check_trainer_state(folder)
    if locate_deepspeed(folder, None) is not None:
        return  # the engine reads it too, and finds out what is missing then
    checkpoint = locate(folder, None)
    if checkpoint is None:
        raise DamagedCheckpointError(f"{folder} holds no complete checkpoint of the engine")
    manifest = _checked(checkpoint)
    ranks = [f"_{rank}" for rank in range(world_size)] if world_size > 1 else [""]
    states = [f"rng_state{rank}.pth" for rank in ranks]
    is_needed = dict.fromkeys(states, world_size == manifest.world_size)
    is_needed[SCHEDULER] = manifest.lr_scheduler is None
    for name, needed in is_needed.items():
        if needed or os.path.lexists(folder / name):
            _check_archive(folder / name)
    if sums:
        verify(checkpoint, manifest)


def check_named(folder: Path) -> None:
    """Check a folder from which a script resumes by name. The DamagedCheckpointError that it raises
    suggests another one.

    Folders under other names, and those of other backends, are left to the Trainer.
    """
    if folder not in of_trainer(folder.parent) or not (folder / RECOVERY_SCRIPT).exists():
        return
    with offering_another(folder / folder.name):
        check_resumable(folder, _world_size(), sums=False)


def _read(path: Path) -> bytes:
    try:
        return disk.read(path)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _check_trainer_state(folder: Path) -> None:
    path = folder / TRAINER_STATE
    try:
        state = json.loads(_read(path))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise damaged(path, error) from None
    step = state.get("global_step") if isinstance(state, dict) else None
    # A folder with a custom name, such as "best", does not say its step.
    if folder in of_trainer(folder.parent) and step != number_of(folder):
        raise damaged(path, f"it is of step {step}, and not of {number_of(folder)}")


def _check_archive(path: Path) -> None:
    """Check a file of `torch.save`, which is a zip archive whose entries have checksums."""
    content = io.BytesIO(_read(path))
    try:
        with zipfile.ZipFile(content) as archive:
            wrong = archive.testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, RuntimeError) as error:
        raise damaged(path, error) from None
    if wrong is not None:
        raise damaged(path, f"{wrong} in it is not what was written")


# The Trainer's folder that is to be synced once it is complete.
to_sync: Path | None = None
_saved_here: set[Path] = set()


def sync_later(folder: Path) -> None:
    """On rank 0, have `sync` sync the Trainer's files in this folder once it has completed them."""
    global to_sync
    sync()
    to_sync = folder if job_folder(folder) != folder else None
    if to_sync is None:
        return
    disk.remove(folder / TRAINER_STATE)  # from an earlier checkpoint of this step
    if folder.parent not in _saved_here:
        _saved_here.add(folder.parent)
        _clean_up_after_kill(folder)


def _clean_up_after_kill(folder: Path) -> None:
    """Before the first save of a run: have the Trainer delete the right folders
    (`save_total_limit`).

    It keeps the folders that were changed last. A killed run may have left incomplete folders of
    later steps, which would count. It may also have begun to delete an old folder, which is then
    the last changed one."""
    bound, number = time.time(), number_of(folder)
    for other in of_trainer(folder.parent):  # the newest first
        if number_of(other) > number:
            if (problem := _incomplete(other)) is not None:
                _set_aside(other, problem)
        elif number_of(other) < number:
            changed = other.stat().st_mtime
            if changed >= bound:
                os.utime(other, (changed, bound - 1))
            bound = min(changed, bound - 1)


@atexit.register
def sync() -> None:
    """If the Trainer has completed the last folder, sync its files. A part of each step, in which
    rank 0 alone must not fail.
    """
    global to_sync
    if to_sync is None or not (to_sync / TRAINER_STATE).exists():
        return
    folder, to_sync = to_sync, None
    try:
        for path in {path for pattern in _WRITTEN_LAST for path in folder.glob(pattern)}:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        disk.sync(folder)
        disk.sync(folder.parent)
    except OSError as error:
        logger.warning("%s: the Trainer's files may not outlast a power cut: %s", folder, error)


def find_resumable(output_dir: str | os.PathLike) -> Path | None:
    """Find the newest `checkpoint-N` in `output_dir` from which a Trainer can resume.

    All files that this number of ranks will read must exist and be intact. Rank 0 logs the reason
    for each folder that is skipped.

    Returns:
        The folder, or None if there is none.
    """
    return _first(
        lambda folder: check_resumable(folder, _world_size()), of_trainer(Path(output_dir))
    )


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def set_incomplete_aside(output_dir: Path, wait: float = 60.0) -> None:
    """Rename the newest of the Trainer's folders to `incomplete-checkpoint-N` until the newest one
    is complete.

    Rank 0 does this, unless another job has locked the folder. The others wait for it; after `wait`
    seconds they raise UsageError, because ranks must not resume from different folders."""
    deadline = time.monotonic() + wait
    while folders := of_trainer(output_dir):
        problem = _incomplete(folders[0])
        if problem is None:
            return
        if os.environ.get("RANK", "0") != "0":
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{folders[0]} is incomplete ({problem}), and rank 0 has not set it aside: all "
                    "ranks need one shared file system, and no other job may write there"
                )
            time.sleep(0.05)
            continue
        try:
            disk.lock(output_dir)
        except UsageError as error:
            logger.warning("%s", error)
            return
        _set_aside(folders[0], problem)


def _set_aside(folder: Path, problem: str) -> None:
    aside = folder.with_name(f"incomplete-{folder.name}")
    while os.path.lexists(aside):
        aside = aside.with_name(f"{aside.name}-again")
    folder.rename(aside)
    text = f"zero: {folder} is incomplete ({problem}): set aside as {aside.name}"
    print(text, file=sys.stderr, flush=True)


def _incomplete(folder: Path) -> str | None:
    """Return why a run cannot resume from one of the Trainer's folders, or None if it can.

    A folder without a checkpoint of the engine is complete if the Trainer has finished it:
    `save_only_model` and other backends make such folders."""
    try:
        _check_trainer_state(folder)
        if (folder / RECOVERY_SCRIPT).exists():  # a save of the engine has begun here
            check_resumable(folder, _world_size(), sums=False)
    except (ValueError, OSError) as error:
        return str(error)
    return None
