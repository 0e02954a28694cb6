"""Checkpoint folders on disk: made visible by one rename, verified by checksums, found again after a crash.

[Note: life of a checkpoint folder]
    .saving-TAG     being written; whatever happens, readers do not see it. Removed by the next save if left over.
    TAG             complete: `checkpoint.json` is in it, and every file that it lists was synced before the rename
    .replaced-TAG   the former TAG, for the moment between two renames when a checkpoint of that name existed; read in
                    its place after a crash in that moment, and put back by the next save
    latest          a file with the newest TAG; changes last, and by a rename of its own

A name beginning with a dot is this module's. Nothing here touches a process group or a tensor.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

logger = logging.getLogger("zero")

DESCRIPTION = "checkpoint.json"
LATEST = "latest"
FORMAT = "zero-checkpoint"
FORMAT_VERSION = 1
# Where scripts look for a model's and for an optimizer's state.
MODEL_FILE = "mp_rank_00_model_states.pt"
OPTIMIZER_FILE = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
_SAVING, _REPLACED = ".saving-", ".replaced-"


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing or is not what was written."""


# -- writing


def check_tag(tag: str) -> str:
    """The tag, if it can name a folder; else ValueError."""
    if not tag or tag.startswith(".") or tag == LATEST or Path(tag).name != tag:
        raise ValueError(f"tag {tag!r}: must be a plain folder name that does not begin with a dot")
    return tag


_SIGNPOST = """The values are in the .distcp files of this folder, in slices that any number of ranks can load.
Show them with `python -m zero inspect`, make a model of them with `python -m zero consolidate`.
"""


RECOVERY_SCRIPT = "zero_to_fp32.py"
_RECOVERY = '''#!/usr/bin/env python
"""python zero_to_fp32.py CHECKPOINT OUT makes a folder with fp32 weights, as DeepSpeed's script of this name does."""
import sys

from zero.__main__ import main

main(["consolidate", *sys.argv[1:], "--dtype", "fp32"])
'''


def begin(save_dir: Path, tag: str, nbytes: int) -> Path:
    """Clean up after dead saves, check that `nbytes` fit, and make the folder to write to.

    Raises:
        OSError: the folder cannot be written to, or has not enough space; nothing has been written then.
    """
    save_dir.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(save_dir)
    free = shutil.disk_usage(save_dir).free
    if nbytes > free:
        text = f"a checkpoint takes {megabytes(nbytes)} and {megabytes(free)} are free; make room or save elsewhere"
        raise OSError(errno.ENOSPC, text, str(save_dir))
    (save_dir / RECOVERY_SCRIPT).write_text(_RECOVERY, encoding="utf-8")
    make_executable(save_dir / RECOVERY_SCRIPT)
    folder = save_dir / (_SAVING + tag)
    folder.mkdir()
    return folder


def leave_signposts(folder: Path, stage: int, world_size: int) -> None:
    """Under the names by which scripts know a DeepSpeed checkpoint: what this one is, and how to read it."""
    patterns = [f"zero_pp_rank_{{}}_{MODEL_FILE}" if stage == 3 else MODEL_FILE, *[OPTIMIZER_FILE] * (stage > 0)]
    for name in {pattern.format(rank) for pattern in patterns for rank in range(world_size)}:
        (folder / name).write_text(_SIGNPOST, encoding="utf-8")


def make_executable(script: str | os.PathLike) -> None:
    """As far as the file system lets us; it can be run by `python` anyway."""
    try:
        os.chmod(script, os.stat(script).st_mode | stat.S_IXUSR)
    except OSError as error:
        logger.info("%s stays without the permission to be executed: %s", script, error)


def _remove_leftovers(save_dir: Path) -> None:
    """Remove what saves that died left behind, and put back a checkpoint whose replacement never came."""
    for replaced in save_dir.glob(f"{_REPLACED}*"):
        original = save_dir / replaced.name.removeprefix(_REPLACED)
        if original.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(original)
    for saving in save_dir.glob(f"{_SAVING}*"):
        shutil.rmtree(saving)
    for name in save_dir.glob(f".{LATEST}*"):
        name.unlink()


def commit(folder: Path, tag: str, description: dict, *, latest: bool) -> None:
    """Write the description and make the folder that `begin` returned the checkpoint `tag`, in one step."""
    save_dir = folder.parent
    for name, entry in description["files"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != entry["bytes"]:
            raise OSError(f"{folder / name} is not what was written; do all ranks write to the same file system?")
    text = json.dumps(description | {"checksum": _own_checksum(description)}, indent=1)
    _write_synced(folder / DESCRIPTION, text)
    _sync(folder)
    target, replaced = save_dir / tag, save_dir / (_REPLACED + tag)
    if target.exists():
        target.rename(replaced)
    folder.rename(target)
    _sync(save_dir)
    if latest:
        temporary = save_dir / f".{LATEST}"
        _write_synced(temporary, tag)
        temporary.replace(save_dir / LATEST)
        _sync(save_dir)
    if replaced.exists():
        shutil.rmtree(replaced)


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own_checksum(description: dict) -> str:
    rest = {key: value for key, value in description.items() if key != "checksum"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


# -- reading


def read_description(folder: Path) -> dict:
    """The checked content of `checkpoint.json`.

    Raises:
        DamagedCheckpointError: it is missing or was changed. ValueError: a newer version wrote it.
    """
    path = folder / DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing: this is not a complete checkpoint of zero") from None
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(description, dict) or description.get("checksum") != _own_checksum(description):
        raise DamagedCheckpointError(f"{path} is damaged: its checksum is not that of its content")
    if description["version"] != FORMAT_VERSION:
        raise ValueError(f"{path}: format version {description['version']}, this program reads {FORMAT_VERSION}")
    # Tensors without elements were once described apart from others that are not sharded.
    empty = {name: {"shape": shape, "dtype": "float32"} for name, shape in description.pop("empty", {}).items()}
    description.setdefault("plain", {}).update(empty)
    return description


def verify(folder: Path, files: Iterable[tuple[str, dict]]) -> None:
    """Compare size and checksum of `files`, (name, entry) pairs of a description; DamagedCheckpointError names one."""
    for name, entry in files:
        path = folder / name
        if not path.exists():
            raise DamagedCheckpointError(f"{path} is missing")
        if (size := path.stat().st_size) != entry["bytes"]:
            raise DamagedCheckpointError(f"{path} is damaged: {size} bytes, {entry['bytes']} were written")
        if _checksum(path) != entry["crc32"]:
            raise DamagedCheckpointError(f"{path} is damaged: its checksum is not that of what was written")


def _checksum(path: Path) -> str:
    crc, buffer = 0, memoryview(bytearray(4 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return f"{crc:08x}"


def read_verified(folder: Path, rank: int = 0, world_size: int = 1) -> dict:
    """The description of a checkpoint whose files are what was written; each of several ranks verifies a share.

    Raises DamagedCheckpointError that names the file, and the newest earlier checkpoint that is intact.
    """
    try:
        description = read_description(folder)
        verify(folder, list(description["files"].items())[rank::world_size])
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error}{offer(folder)}") from error
    return description


# -- finding


def locate(load_dir: Path, tag: str | None) -> Path | None:
    """The folder of checkpoint `tag` in `load_dir`, without a tag that of the newest one; None if there is none.

    `load_dir` may be a checkpoint's own folder. Raises ValueError if the tag, given or from `latest`, has no folder.
    """
    if tag is None and (load_dir / DESCRIPTION).is_file():
        return load_dir
    if tag is None and (load_dir / LATEST).is_file():
        tag = check_tag((load_dir / LATEST).read_text(encoding="utf-8").strip())
    if tag is None:
        return next(iter(_newest_first([load_dir])), None)
    for folder in (load_dir / tag, load_dir / (_REPLACED + tag)):
        if folder.is_dir():
            return folder
    raise ValueError(f"{load_dir}: there is no checkpoint {tag!r}{offer(load_dir / tag)}")


def find_intact(folder: str | os.PathLike, before: Path | None = None) -> Path | None:
    """The newest checkpoint under `folder` whose every checksum is right, or None.

    `folder` holds checkpoints (`global_stepN`), or the Trainer's folders (`checkpoint-N`) that hold one each. With
    `before`, a checkpoint's folder, only older ones count.
    """
    found = _newest_first([Path(folder), *_of_trainer(Path(folder))])
    return _first_intact(each for each in found if before is None or _number(each) < _number(before))


def find_resumable(output_dir: str | os.PathLike) -> Path | None:
    """The newest of the Trainer's folders in `output_dir` to resume from, `checkpoint-N`, or None.

    It holds an intact checkpoint and the Trainer's own state. What a run that was killed left incomplete, and what was
    damaged since, is passed over.
    """
    intact = _first_intact(_newest_first(_of_trainer(Path(output_dir))))
    return None if intact is None else intact.parent


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    """Complete-looking checkpoints directly in `folders`, the one with the highest number first."""
    found = {}
    for path in (path.parent for folder in folders for path in sorted(folder.glob(f"*/{DESCRIPTION}"))):
        if not path.name.startswith(_SAVING):
            # In this order one under its own name comes after the one that it replaces.
            found[path.with_name(path.name.removeprefix(_REPLACED))] = path
    return [found[path] for path in sorted(found, key=lambda path: (_number(path), path.name), reverse=True)]


def _number(folder: Path) -> int:
    digits = re.search(r"(\d+)$", folder.name)
    return int(digits[1]) if digits else -1


def _of_trainer(output_dir: Path) -> Iterator[Path]:
    """The folders of a Trainer that are complete: it writes its state last."""
    for state in output_dir.glob("checkpoint-*/trainer_state.json"):
        try:
            json.loads(state.read_text(encoding="utf-8"))
        except ValueError:
            continue  # cut off by a crash
        yield state.parent


def _first_intact(candidates: Iterable[Path]) -> Path | None:
    for candidate in candidates:
        try:
            verify(candidate, read_description(candidate)["files"].items())
        except (ValueError, OSError):
            continue
        return candidate
    return None


def offer(damaged: Path) -> str:
    """The end of an error message: which checkpoint to load in place of this one."""
    outside = damaged.parent.parent if re.fullmatch(r"checkpoint-\d+", damaged.parent.name) else damaged.parent
    intact = find_intact(outside, before=damaged)
    if intact is None:
        return "; there is no earlier intact checkpoint beside it"
    where = intact.parent if intact.parent != damaged.parent else intact
    return f"; the newest earlier intact checkpoint is {where}"


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
