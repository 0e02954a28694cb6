"""Saves and loads training checkpoints. A save is safe against crashes, and a checkpoint loads on
any number of ranks.

    save   every rank describes what it has -> rank 0 cleans up and makes a hidden folder
           every rank writes its slices -> rank 0 writes `checkpoint.json`, renames the folder and
           updates `latest`
    load   rank 0 finds the folder
           every rank compares names and shapes; rank 0 also checks that all files are there
           every rank reads and verifies what it needs for masters and optimizer state; the masters
           are rounded into the shards, and groups are resharded or gathered again
           every rank restores counters, hyperparameters and random states

Each line is one exchange between the ranks. If one rank fails, every rank raises the same error.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint import folder as folders
from zero.checkpoint import state
from zero.checkpoint.files import CheckpointReader, Slice, Stored, name_in, open_checkpoint, write
from zero.checkpoint.manifest import DATA_FILE, MANIFEST, Manifest, damaged
from zero.checkpoint.models import describe_adapters
from zero.checkpoint.state import EngineState, Progress
from zero.checkpoint.values import dtype_of
from zero.comm.communicator import Communicator
from zero.comm.control import Control
from zero.core.layout import round_up
from zero.device import beside, is_accelerator, ready_for_thread
from zero.errors import UsageError
from zero.offload.tiers import Tier
from zero.optim.sharded_optimizer import ZeroOptimizer
from zero.threads import EngineThread

logger = logging.getLogger("zero")

# An upper bound of the bytes that describe a slice, in its file and in the manifest.
_BYTES_PER_SLICE = 1024
# What Python, numpy and torch raise for a stored value of a kind that they do not expect.
_NOT_UNDERSTOOD = ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError


# -- save


def save_checkpoint(
    engine: EngineState,
    save_dir: str | os.PathLike,
    tag: str | None,
    client_state: dict,
    *,
    latest: bool,
    exclude_frozen: bool,
    validation: str,
    background: BackgroundSaves | None,
) -> None:
    """Write the training state to `save_dir/tag`: see `ZeroEngine.save_checkpoint`.

    Args:
        validation: what happens if the ranks gave different tags: "Fail", "Warn" or "Ignore".
        background: writes it while training continues. With None it is complete at the end.
    """
    if save_dir is None or not os.fspath(save_dir):
        raise UsageError(f"save_checkpoint: save_dir is {save_dir!r}; name the folder to save to")
    what = "saving a checkpoint", f" to {save_dir}", True
    ranks = engine.comm.control(*what).wait_for_all()
    tag = f"global_step{engine.progress.global_steps}" if tag is None else str(tag)
    save = _Save(engine, ranks.rank, Path(save_dir), tag, latest)
    if background is not None:
        background.wait()
    folder, writers = ranks.lead(
        lambda: save.collect(client_state, exclude_frozen),
        lambda of_ranks: save.begin(of_ranks, validation),
    )
    if background is None or _is_in_files(engine):
        save.finish(ranks, folder, lambda: save.all_slices(writers))
    else:
        in_thread = Control(background.channel, *what)
        with _abandoning(folder, ranks.rank):
            ranks.together(lambda: background.copy(save.all_slices(writers)))
        background.start(lambda slices: save.finish(in_thread, folder, slices))


@contextmanager
def _abandoning(folder: Path, rank: int) -> Iterator[None]:
    """Context for a save after its folder has been made. If it fails, rank 0 removes the folder."""
    try:
        yield
    except BaseException:
        if rank == 0:
            folders.abandon(folder)
        raise


def _is_in_files(engine: EngineState) -> bool:
    """Whether some state is in files. It does not fit in host memory then, so it cannot be copied
    there for a save in the background.
    """
    shards = () if engine.optimizer is None else engine.optimizer.shards.values()
    return any(each.tier.file for each in [*engine.groups, *shards])


class _Save:
    """One save: what this rank contributes, and the steps that all ranks take together.

    Attributes:
        description: the content of `checkpoint.json`; on rank 0, for all ranks.
    """

    def __init__(self, engine: EngineState, rank: int, save_dir: Path, tag: str, latest: bool):
        self._engine = engine
        self._rank = rank
        self._save_dir = save_dir
        self._tag = tag
        self._latest = latest
        self._slices: list[Slice] = []
        self.description: dict[str, Any] = {}

    def collect(self, client_state: dict, exclude_frozen: bool) -> dict[str, Any]:
        """Return what rank 0 must know about this rank."""
        engine, tag = self._engine, folders.check_tag(self._tag)
        if engine.optimizer is not None and engine.optimizer.writes is not None:
            engine.optimizer.writes.between_passes()
        self._slices, kinds = state.slices_to_store(engine, exclude_frozen)
        self.description = state.describe_engine(engine, client_state, exclude_frozen)
        # Ranks have different parts of a model that is split over a model group.
        is_split = engine.comm.model is not None
        different = ("parameters", "plain", "tied", "state_dict") if is_split else ()
        return {
            "tag": tag,
            "bytes": sum(each.values.nbytes + _BYTES_PER_SLICE for each in self._slices),
            "state": kinds,
            "random_states": state.random_states(engine.comm.device),
            "model": {key: self.description[key] for key in different},
        }

    def begin(
        self, of_ranks: Sequence[dict[str, Any]], validation: str
    ) -> tuple[Path, dict[str, int]]:
        """On rank 0, describe what all ranks have, and make the folder.

        Returns the folder, and for plain tensors that rank 0 may not have, which rank writes them.
        """
        description, writers = self.description, {}
        tag = _agreed_tag([each["tag"] for each in of_ranks], validation)
        description["tag"] = tag
        description["random_states"] = [each["random_states"] for each in of_ranks]
        if of_adapters := describe_adapters(self._engine.module):
            description["adapters"] = of_adapters
        for rank, of_rank in enumerate(of_ranks):
            for key, entries in of_rank["model"].items():
                description[key] = entries | description[key]
            for name in of_rank["model"].get("plain", ()):
                writers.setdefault(name, rank)
            for key, kind in of_rank["state"].items():
                merged = description["optimizer"]["state"].setdefault(key, kind)
                for part in kind.keys() - {"dtype"}:
                    merged[part] = merged.get(part, {}) | kind[part]
        nbytes = sum(each["bytes"] for each in of_ranks) + len(json.dumps(description))
        for entry in description["plain"].values():
            nbytes += math.prod(entry["shape"]) * dtype_of(entry["dtype"]).itemsize
        if any(each.is_fresh for each in self._engine.reducer.gradients.values()):
            text = "gradients of an unfinished accumulation are not part of the checkpoint %s"
            logger.warning(text, tag)
        folder = folders.begin(self._save_dir, tag, nbytes)
        with _abandoning(folder, self._rank):
            folders.sync_later(self._save_dir)
        return folder, writers

    def all_slices(self, writers: dict[str, int]) -> list[Slice]:
        """Return what this rank writes, including plain tensors that no other rank writes."""
        plain = state.plain_tensors(self._engine.module, self.description["frozen_excluded"])
        return self._slices + [
            Slice.whole(f"plain/{name}", value.contiguous())
            for name, value in plain.items()
            if writers.get(name, 0) == self._rank
        ]

    def finish(self, ranks: Control, folder: Path, slices: Callable[[], Sequence[Slice]]) -> None:
        """Write what `slices` returns, on every rank; then rank 0 makes the folder visible, or
        removes it.

        It may run in a thread, with a channel of its own.
        """
        description = self.description

        def commit(of_ranks: Sequence[dict[str, Any]]) -> None:
            for of_rank in of_ranks:
                description["files"][of_rank["name"]] = of_rank["file"]
                for key, entry in of_rank["tensors"].items():
                    tensor = description["tensors"].setdefault(key, entry | {"slices": []})
                    tensor["slices"] += entry["slices"]
            folders.commit(folder, description["tag"], description, latest=self._latest)

        name = DATA_FILE.format(ranks.rank)
        with _abandoning(folder, ranks.rank):
            ranks.lead(lambda: write(slices(), folder, name), commit)


def _agreed_tag(tags: Sequence[str], validation: str) -> str:
    """Return rank 0's tag, after `validation`; see `save_checkpoint`."""
    if validation != "Ignore" and len(set(tags)) > 1:
        message = f"save_checkpoint: the ranks gave different tags: {', '.join(tags)}"
        if validation == "Fail":
            raise UsageError(
                f"{message}; give the same one, or set checkpoint.tag_validation to Warn"
            )
        logger.warning("%s; rank 0's is used", message)
    return tags[0]


# -- load


def load_checkpoint(
    engine: EngineState,
    load_dir: str | os.PathLike,
    tag: str | None,
    *,
    strict: bool,
    load_optimizer: bool,
    load_lr_scheduler: bool,
    module_only: bool,
    open_deepspeed: Callable[[Path], CheckpointReader],
) -> tuple[str | None, Progress]:
    """Restore a checkpoint: see `ZeroEngine.load_checkpoint`.

    Args:
        open_deepspeed: returns a reader of a folder that DeepSpeed has written.

    Returns:
        The checkpoint's folder, or None if there is none.
        How far the run is now.
    """
    wait_for_background_saves()
    control = engine.comm.control("loading a checkpoint", f" from {load_dir}", is_long=True)
    ranks = control.wait_for_all()
    source, here = Path(load_dir), _shapes(engine)
    tag = None if tag is None else str(tag)
    found = ranks.lead(
        lambda: list(here) if engine.comm.model is not None else [],
        lambda of_ranks: {
            "deepspeed": (deepspeed := folders.locate_deepspeed(source, tag)),
            "folder": deepspeed or folders.locate_tag(source, tag),
            "has_random_states": any(source.glob("rng_state*.pth")),
            "elsewhere": sorted(set().union(*of_ranks)),
        },
    )
    folder = found["folder"]
    if folder is None:
        if ranks.rank == 0:
            logger.warning("%s: there is no checkpoint", source)
        return None, engine.progress
    optimizer = engine.optimizer if load_optimizer and not module_only else None

    def check() -> tuple[CheckpointReader, set[str]]:
        with folders.offering_another(folder):
            if found["deepspeed"]:
                reader = open_deepspeed(folder)
            else:
                reader = open_checkpoint(folder, state.cuts_of(engine), all_files=ranks.rank == 0)
            if ranks.rank == 0 and source != folder and (source / folders.TRAINER_STATE).exists():
                folders.check_resumable(source, ranks.world_size, sums=False)
        names = _names_to_load(engine, reader.manifest, strict, found["elsewhere"])
        if optimizer is not None:
            _check_optimizer(engine, optimizer, reader.manifest)
            if found["deepspeed"] and (source / folders.SCHEDULER).is_file():
                _check_groups(source, optimizer, reader.manifest)
        return reader, names

    reader, names = ranks.together(check)
    manifest = reader.manifest

    def restore() -> Progress:
        progress = Progress.of(manifest)
        if module_only:
            return replace(engine.progress, client_state=progress.client_state)
        with _stored_in(folder, "optimizer or loss_scaler"):
            if optimizer is not None:
                state.restore_group_settings(engine, optimizer, manifest)
                if engine.scaler is not None and progress.loss_scaler is not None:
                    engine.scaler.load_state_dict(progress.loss_scaler)
        if load_lr_scheduler and engine.lr_scheduler and progress.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(progress.lr_scheduler)
        if manifest.world_size == ranks.world_size and not found["has_random_states"]:
            with _stored_in(folder, "random_states"):
                states = manifest.random_states[ranks.rank]
                state.restore_random_states(states, engine.comm.device)
        return progress

    _read(engine, ranks, reader, names, optimizer)
    return str(folder), ranks.together(restore)


@contextmanager
def _stored_in(folder: Path, part: str) -> Iterator[None]:
    """Context in which a part of the manifest is restored that only its own readers understand."""
    try:
        yield
    except _NOT_UNDERSTOOD as error:
        raise damaged(folder / MANIFEST, f"{part}: {type(error).__name__}: {error}") from error


def _check_optimizer(engine: EngineState, optimizer: ZeroOptimizer, manifest: Manifest) -> None:
    """Raise ValueError if the stored optimizer state is not for this optimizer and these
    parameters.
    """
    stored = manifest.optimizer
    remedy = "load with load_optimizer_states=False to start with a fresh state"
    if stored is None:
        raise UsageError(f"the checkpoint holds no optimizer state; {remedy}")
    if not set(stored.classes) & set(state.classes_of(optimizer.optimizer)):
        here = type(optimizer.optimizer).__name__
        raise UsageError(
            f"the checkpoint's optimizer is {stored.classes[0]}, the present one {here}; {remedy}"
        )
    for name in state.group_of(engine, optimizer):
        if name not in manifest.parameters or manifest.parameters[name].group is None:
            what = f"the checkpoint has no optimizer state for parameter {name!r}"
            raise UsageError(f"{what}; {remedy}")


def _check_groups(source: Path, optimizer: ZeroOptimizer, manifest: Manifest) -> None:
    """Raise ValueError if the schedule of a DeepSpeed checkpoint is for other param groups."""
    assert manifest.optimizer is not None
    here, there = len(optimizer.param_groups), len(manifest.optimizer.groups)
    if here != there:
        raise UsageError(
            f"{source}: its {folders.SCHEDULER} is for {there} param group(s), and the optimizer "
            f"has {here}, because DeepSpeed removes those without parameters. Resume from what "
            "`zero adopt` makes of the folder"
        )


def _shapes(engine: EngineState, exclude_frozen: bool = False) -> dict[str, list[int]]:
    """Return the shapes of everything that this rank has of the model, by name."""
    plain = state.plain_tensors(engine.module, exclude_frozen)
    params = state.parameters(engine, exclude_frozen)
    shapes = {name: list(value.shape) for name, value in plain.items()}
    return shapes | {name: entry["shape"] for name, entry in params.items()}


def _names_to_load(
    engine: EngineState, manifest: Manifest, strict: bool, elsewhere: Sequence[str]
) -> set[str]:
    """Return the names that the model and the checkpoint have in common. `elsewhere`: names that
    some rank has.

    Raises ValueError if shapes differ, or with `strict`, if names differ.
    """
    stored = {name: entry.shape for name, entry in (manifest.parameters | manifest.plain).items()}
    here = _shapes(engine)
    common = here.keys() & stored.keys()
    for name in sorted(common):
        if here[name] != stored[name]:
            raise UsageError(
                f"parameter {name!r} has shape {stored[name]} in the checkpoint and {here[name]} "
                "in the model"
            )
    missing = sorted(_shapes(engine, manifest.frozen_excluded).keys() - common)
    unexpected = sorted(stored.keys() - common - set(elsewhere))
    if strict and (missing or unexpected):
        raise UsageError(
            f"the checkpoint does not fit the model: it lacks {_some(missing)} and has "
            f"{_some(unexpected)} which the model lacks; load what they have in common with "
            "load_module_strict=False"
        )
    return common


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(map(repr, names[:3])) or "nothing") + more


def _read(
    engine: EngineState,
    ranks: Control,
    reader: CheckpointReader,
    names: set[str],
    optimizer: ZeroOptimizer | None,
) -> None:
    """Read the weights `names`, and the state of `optimizer` if it is given."""
    if engine.optimizer is not None:
        engine.optimizer.end_updates()

    def read() -> None:
        slices = [each for each in state.weights(engine) if name_in(each.key) in names]
        strided: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, value in state.plain_tensors(engine.module).items():
            if name in names:
                memory = value.detach().contiguous()
                slices.append(Slice.whole(f"plain/{name}", memory))
                if not value.is_contiguous():
                    strided.append((value.detach(), memory))
        with folders.offering_another(reader.folder):
            reader.read(slices)
            for value, memory in strided:
                value.copy_(memory)
            if optimizer is not None:
                state.read_optimizer_state(optimizer, reader)

    try:
        ranks.together(read)
    except BaseException:
        if engine.optimizer is not None:
            why = "a checkpoint was read in part; load another one before going on"
            engine.optimizer.spoil(why)
        raise
    engine.reducer.clear()
    shards = {} if engine.optimizer is None else engine.optimizer.shards
    for group in engine.groups:
        if group in shards:
            shards[group].master_was_replaced()
        else:
            group.refresh()


# -- saves while training continues (`"checkpoint": {"async_save": true}`)
#
# save_checkpoint   waits for the previous save -> copies this rank's slices to host memory ->
#                   starts a thread
# thread            writes, verifies and renames like a save in the foreground, over its own
#                   connections
# step              checks whether a running save has ended on all ranks; if it failed, all ranks
#                   raise its error
# exit              waits for the thread; the exit code is 1 if the save failed and no call has
#                   raised its error

# Of the running saves, in the order in which they have begun, which is the same on all ranks.
_running: list[BackgroundSaves] = []


class BackgroundSaves:
    """The saves of one engine, at most one at a time, and the host memory for their copies.

    Attributes:
        channel: over which ranks agree in the thread.
    """

    def __init__(self, comm: Communicator, optimizer: ZeroOptimizer | None):
        self._comm = comm
        self.channel = comm.new_channel("asynchronous saves")
        self._ended = comm.control("waiting for a checkpoint", is_long=True)
        self._device = comm.device
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copies: list[Slice] = []
        self._later: list[tuple[torch.Tensor, torch.Tensor | Stored]] = []
        self._thread: EngineThread | None = None
        self._copied = threading.Event() if optimizer is None else optimizer.read_by_saves
        self._failure: Exception | None = None

    def copy(self, slices: Sequence[Slice]) -> None:
        """Copy `slices` to host memory, which is kept for the next save.

        The thread copies the optimizer's state later. Until then, `ZeroOptimizer.wait` blocks
        anything that would change it."""
        nbytes = sum(round_up(each.values.nbytes, 64) for each in slices)
        if self._memory.numel() < nbytes:
            # Free the old memory before allocating the new one.
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            host = Tier(torch.device("cpu"), pinned=is_accelerator(self._device))
            self._memory = host.empty(nbytes, torch.uint8)
        position = 0
        self._copies.clear()
        self._later.clear()
        for each in slices:
            memory = self._memory[position : position + each.values.nbytes]
            position += round_up(memory.nbytes, 64)
            target = memory.view(each.values.dtype)
            self._copies.append(each._replace(values=target))
            if isinstance(each.values, Stored) or each.key.startswith("optimizer/"):
                self._later.append((target, each.values))
            else:
                target.copy_(each.values, non_blocking=True)

    def start(self, act: Callable[[Callable[[], list[Slice]]], None]) -> None:
        """Call `act` in a thread, with a function that completes the copies and returns them.

        If that fails, `act` must tell the other ranks, which wait for this one."""
        self._copied.clear()
        thread = EngineThread(
            self._run,
            act,
            ready_for_thread(self._device),
            name="zero checkpoint",
            # A process of `multiprocessing` calls no exit handlers.
            daemon=multiprocessing.parent_process() is None,
        )
        try:
            thread.start()
        except BaseException:
            self._copied.set()  # nothing else would, and the next update waits for it
            raise
        self._thread = thread
        atexit.register(self._at_exit)
        _running.append(self)

    def _run(
        self, act: Callable[[Callable[[], list[Slice]]], None], ready: torch.Event | None
    ) -> None:
        try:
            act(partial(self._complete, ready))
        except Exception as error:  # `check` raises it in the main thread
            self._failure = error
        finally:
            self._copied.set()

    def _complete(self, ready: torch.Event | None) -> list[Slice]:
        # On a separate stream, so that the copies overlap with the kernels of training.
        with beside(self._device, ready) as stream:
            for target, part in self._later:
                values = part.values() if isinstance(part, Stored) else part
                target.copy_(values, non_blocking=True)
            if stream is not None:
                stream.synchronize()
        self._later.clear()
        self._copied.set()
        return self._copies

    def wait(self) -> None:
        """Wait for the running save, if there is one, and raise its error, which is the same on all
        ranks.

        Every rank must wait at the same time, so that each notices if another one has died.
        """
        while self._thread is not None:
            self._thread.join(0.01)
            self.check()

    def check(self) -> None:
        """Raise the error of a save that has failed; every rank must ask at the same time."""
        if self._thread is None:
            return
        if self._ended.any(self._thread.is_alive()):
            return
        _running.remove(self)
        atexit.unregister(self._at_exit)
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None:
            raise failure

    def _at_exit(self) -> None:
        if self._thread is not None:
            self._thread.finish()
        if self._failure is not None:
            logger.error("%s", self._failure)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def wait_for_background_saves() -> None:
    """Wait until all asynchronous saves of this process are complete.

    If one of them has failed, raises its error, the same on all ranks.
    """
    for saves in list(_running):
        saves.wait()
