"""`zero adopt` and `zero convert`: checkpoints come from other engines and go back to them."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero.checkpoint import disk
from zero.checkpoint import folder as folders
from zero.checkpoint.manifest import MANIFEST
from zero.conversion import dcp, deepspeed, full, ours
from zero.conversion.training_state import TrainingState
from zero.errors import UsageError
from zero.tools.arguments import Parser, working

# Each can say whether a folder has its files, and read it. The first that recognizes a folder does.
READERS = (deepspeed, dcp, full)
# What Python and torch raise for a value of a kind that a reader does not expect in a file.
_NOT_UNDERSTOOD = ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError
WRITERS = {"deepspeed": deepspeed.write, "dcp": dcp.write, "hf": full.write}

Read = Callable[[Path], TrainingState]
Write = Callable[[TrainingState, Path], Any]


def adopt(arguments: list[str]) -> None:
    options = Parser("adopt").parse_args(arguments)
    _carry("adopt", options, "zero", read_any, ours.write)


def convert(arguments: list[str]) -> None:
    parser = Parser("convert")
    options = parser.parse_intermixed_args(arguments)  # OUT may come last
    if options.ranks and options.to != "deepspeed":
        parser.error(f"--ranks is for DeepSpeed; {options.to} loads on any number of processes")

    def read(folder: Path) -> TrainingState:
        if any(reader.recognizes(folder) for reader in READERS):
            raise UsageError(f"{folder} is of another engine: turn it into one of zero with adopt")
        state = ours.read(folder)
        state.ranks = options.ranks or state.ranks
        return state

    _carry("convert", options, options.to, read, WRITERS[options.to])


def _carry(command: str, options: Namespace, kind: str, read: Read, write: Write) -> None:
    """Write a checkpoint of this kind from the one in `options.folder`, and say what is missing."""
    folder = Path(options.folder).resolve()
    out = _new(folder, options.out, kind)
    with working(f"{command}: reading {folder}", 5.0) as show:
        state = read(folder)
        show(f"{command}: writing {out}")
        _write(write, state, out)
    print(f"{out}: step {state.global_steps} of {state.source}")
    for each in state.missing:
        print(f"not carried over: {each}")


def read_any(folder: Path) -> TrainingState:
    """Return the state in a checkpoint of another engine, which its files identify."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder")
    for reader in READERS:
        if reader.recognizes(folder):
            try:
                return reader.read(folder)
            except _NOT_UNDERSTOOD as error:
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise UsageError(f"{folder}: a file is not as its format says ({what})") from error
    inside = [path for path in folder.iterdir() if any(each.recognizes(path) for each in READERS)]
    own = folders.locate(next(iter(folders.of_trainer(folder)), folder), None)
    if not inside and own is not None and (own / MANIFEST).is_file():
        raise UsageError(f"{own} is a checkpoint of zero already: resume from it as it is")
    if newest := max(inside, key=folders.number_of, default=None):
        raise UsageError(f"{folder} contains checkpoints: name one of them, such as {newest}")
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise UsageError(
        f"{folder}: no checkpoint that zero can read; it has {names}. Name the folder that the "
        "other engine saved, such as checkpoint-500"
    )


def _new(folder: Path, given: str | None, kind: str) -> Path:
    """Return the folder to write to. By default it is beside the one that has `latest`."""
    job = folder.parent if (folder.parent / folders.LATEST).is_file() else folder
    out = Path(given or f"{job}-{kind}")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty; name a new folder")
    if os.path.ismount(out):
        raise UsageError(f"{out} is the root of a file system; name a folder in it")
    if out.resolve().is_relative_to(folder):
        raise UsageError(f"{out} is inside of {folder}, which is not changed; name another folder")
    return out


def _write(write: Write, state: TrainingState, out: Path) -> None:
    """Have `write` make a hidden folder, which is renamed to `out` once it is whole.

    What a killed process has left there is removed. Raises OSError if the disk is full.
    """
    out = out.resolve()
    work = out.with_name(f".unfinished-{out.name}")
    disk.make_folders(work)
    disk.lock(work)
    for path in work.iterdir():
        if path.name != disk.LOCK:
            disk.remove(path)
    try:
        nbytes = sum(each.nbytes for each in ours.to_store(state).values())
        disk.require_room(work, nbytes, "it", out)
        write(state, work)
        disk.remove(work / disk.LOCK)
        work.rename(out)
    except BaseException as error:
        disk.remove(work)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            raise OSError(error.errno, error.strerror, str(out)) from error
        raise
    disk.sync(out.parent)
