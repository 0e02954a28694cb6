"""Checkpoint folders on disk, which become visible by a single rename and are found again after a
crash.

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
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

from zero.checkpoint import disk
from zero.checkpoint.manifest import MANIFEST, to_text
from zero.errors import UsageError

logger = logging.getLogger("zero")

LATEST = "latest"
MODEL_FILE = "mp_rank_00_model_states.pt"  # of DeepSpeed
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
