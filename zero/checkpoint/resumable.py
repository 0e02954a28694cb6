"""Finds the checkpoints that can be loaded: those with correct checksums, and the Trainer's folders
that are complete.

[Note: the Trainer's folders] The Trainer fills `checkpoint-N` in its own order: the model, the
engine's checkpoint, `scheduler.pt`, random states of each rank, `trainer_state.json`. It does not
signal when it has finished, and does not sync its files. A later step, save or exit therefore syncs
them. A folder is complete if every file exists and is whole, as far as this can be seen from the
file's own format."""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zero.checkpoint import disk
from zero.checkpoint.blocks import check_files, verify
from zero.checkpoint.folder import (
    LATEST,
    RECOVERY_SCRIPT,
    job_folder,
    locate,
    locate_deepspeed,
    newest_first,
    number_of,
    of_trainer,
)
from zero.checkpoint.manifest import DamagedCheckpointError, Manifest, damaged, read_manifest
from zero.errors import UsageError

logger = logging.getLogger("zero")

TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
_OF_TRAINER = ("rng_state*.pth", "*.pt", TRAINER_STATE, LATEST)


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
        for path in {path for pattern in _OF_TRAINER for path in folder.glob(pattern)}:
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
