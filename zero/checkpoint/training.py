"""Training checkpoints: written by any number of ranks, safe against crashes, read by any other number of ranks.

    save   agree on the name and the size -> rank 0 cleans up and makes a hidden folder -> all ranks write their slices
           -> rank 0 writes `checkpoint.json`, renames the folder and points `latest` to it
    load   find the folder -> all ranks verify a share of the files -> compare names and shapes -> read into the masters
           and the optimizer state -> round the masters into the shards, renew what is gathered

Where one rank fails, every rank raises the same error.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zero.checkpoint import folder as folders
from zero.checkpoint import state
from zero.checkpoint.background import BackgroundSaves, wait_for_background_saves
from zero.checkpoint.model import model_config
from zero.checkpoint.ranks import Ranks
from zero.checkpoint.slices import SliceReader, Slices, whole, write
from zero.checkpoint.values import decode, dtype_name, encode
from zero.errors import UsageError

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

logger = logging.getLogger("zero")

# Each slice is a record of its own in a file; an upper bound of what surrounds its bytes there and in the index.
_BYTES_PER_SLICE = 4096


# -- save


def save_checkpoint(
    engine: ZeroEngine,
    save_dir: str | os.PathLike,
    tag: str | None = None,
    client_state: dict | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write the training state to `save_dir/tag`; every rank must call it. Returns True.

    Args:
        tag: name of the folder; default `global_stepN`. A checkpoint of that name is replaced.
        client_state: a dict of the caller's, returned by `load_checkpoint`: numbers, strings, containers, tensors.
        save_latest: make it the one that is loaded when no tag is given.
        exclude_frozen_parameters: leave out the weights of parameters that are not trained.

    With `checkpoint.async_save` it returns before the checkpoint is written; see `zero.checkpoint.background`.

    Raises:
        OSError: the disk is full or the folder cannot be written to. ValueError: for a bad tag or a value that cannot
        be stored. On every rank alike; the checkpoints that existed are still there.
    """
    if save_dir is None or not os.fspath(save_dir):
        raise UsageError(f"save_checkpoint: save_dir is {save_dir!r}; name the folder to save to")
    what = f"saving a checkpoint to {save_dir}"
    ranks = Ranks.of(engine.comm, what)
    tag = ranks.together(lambda: folders.check_tag(f"global_step{engine.global_steps}" if tag is None else str(tag)))
    tag = _agreed(tag, ranks, engine.settings.checkpoint.tag_validation)
    # A copy in host memory of what is in files because it does not fit there would be no help.
    in_files = any(unit.tier.file or unit.optimizer_tier.file for unit in engine.units)
    background = BackgroundSaves.of(engine) if engine.settings.checkpoint.async_save and not in_files else None
    if background is not None:
        background.wait()
    if ranks.rank == 0 and any(engine.reducer.is_fresh(unit) for unit in engine.units):
        logger.warning("gradients of an unfinished accumulation are not part of the checkpoint %s", tag)
    slices, description = _collect(engine, ranks, client_state or {}, exclude_frozen_parameters)
    description["tag"] = tag

    size = sum(entry.nbytes + _BYTES_PER_SLICE * len(entry.parts) for entry in slices.values())
    # At stage 0 all ranks hold the same slices, and DCP has each one written by one of them.
    combine = max if engine.settings.zero_optimization.stage == 0 else sum
    total = combine(ranks.gather(size)) + len(json.dumps(description))
    folder = ranks.on_first(lambda: folders.begin(Path(save_dir), tag, total))
    if background is None:
        _finish(ranks, folder, slices, description, save_latest)
    else:
        in_thread = Ranks(background.connection, what)

        def act(copies: dict[str, Slices]) -> None:
            _finish(in_thread, folder, copies, description, save_latest)

        copies = ranks.together(lambda: background.copy(slices))
        background.start(copies, act)
    return True


def _agreed(tag: str, ranks: Ranks, validation: str) -> str:
    """Rank 0's tag. Where the ranks gave different ones: UsageError if `validation` is "Fail", a warning if "Warn"."""
    tags = ranks.gather(tag)
    if validation != "Ignore" and len(set(tags)) > 1:
        message = f"save_checkpoint: the ranks gave different tags: {', '.join(tags)}"
        if validation == "Fail":
            raise UsageError(f"{message}; give the same one, or set checkpoint.tag_validation to Warn")
        logger.warning("%s; rank 0's is used", message)
    return tags[0]


def _collect(
    engine: ZeroEngine, ranks: Ranks, client_state: dict, exclude_frozen: bool
) -> tuple[dict[str, Slices], dict]:
    """This rank's slices, as views, and the description, the same on all ranks."""

    def collect() -> tuple[dict[str, Slices], dict, dict]:
        slices, kinds = state.weights(engine, exclude_frozen), {}
        if ranks.rank == 0:
            for name, value in state.plain_tensors(engine.module).items():
                slices[f"plain/{name}"] = whole(value.contiguous())
        if engine.optimizer is not None:
            of_optimizer, kinds = state.optimizer_slices(engine)
            slices |= of_optimizer
        for entry in slices.values():
            entry.split()
        return slices, kinds, _describe(engine, client_state, exclude_frozen)

    slices, kinds, description = ranks.together(collect)
    gathered = ranks.gather((kinds, state.random_states(engine.comm.device)))
    description["random_states"] = [states for _, states in gathered]
    for kinds, _ in gathered:  # a rank whose shards are all padding knows none
        if kinds:
            description["optimizer"]["state"] |= kinds
    return slices, description


def _describe(engine: ZeroEngine, client_state: dict, exclude_frozen: bool) -> dict:
    """All of `checkpoint.json` that every rank knows."""
    optimizer, scheduler, scaler = engine.optimizer, engine.lr_scheduler, engine.scaler
    description = {
        "format": folders.FORMAT,
        "version": folders.FORMAT_VERSION,
        "torch": torch.__version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world_size": engine.comm.world_size,
        "stage": engine.settings.zero_optimization.stage,
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "global_samples": engine.global_samples,
        "gradient_accumulation_steps": engine.settings.gradient_accumulation_steps,
        "loss_scaler": None if scaler is None else encode(scaler.state_dict(), "loss_scaler"),
        "lr_scheduler": None if scheduler is None else encode(scheduler.state_dict(), "lr_scheduler"),
        "client_state": encode(client_state, "client_state"),
        "frozen_excluded": exclude_frozen,
        "parameters": _parameters(engine, exclude_frozen),
        "tied": state.tied_names(engine.module),
        "plain": {
            name: {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
            for name, value in state.plain_tensors(engine.module).items()
        },
        "optimizer": None,
        "model_config": model_config(engine.module),
    }
    if optimizer is not None:
        groups, classes = state.group_settings(engine), state.classes_of(optimizer.optimizer)
        description["optimizer"] = {"classes": classes, "groups": groups, "state": {}}
        for name, group in state.group_of(engine).items():
            description["parameters"][name]["group"] = group
    return description


def _parameters(engine: ZeroEngine, exclude_frozen: bool = False) -> dict[str, dict]:
    """Shape and compute dtype of each sharded parameter, in the model's order."""
    found = {
        name: {"shape": list(slot.shape), "dtype": dtype_name(unit.dtype), "trainable": unit.trainable}
        for unit in engine.units
        if unit.trainable or not exclude_frozen
        for name, slot in zip(unit.param_names, unit.layout.slots, strict=True)
    }
    return {name: found[name] for name, _ in engine.module.named_parameters() if name in found}


def _finish(ranks: Ranks, folder: Path, slices: dict[str, Slices], description: dict, latest: bool) -> None:
    """Write into the folder that was begun and make it visible, or remove it; every rank must call it."""

    def commit() -> None:
        folders.leave_signposts(folder, description["stage"], description["world_size"])
        folders.commit(folder, description["tag"], description, latest=latest)

    try:
        description["files"] = write(slices, folder, ranks)
        ranks.on_first(commit)
    except Exception:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # as far as the disk still lets us; the next save does the rest
        raise


# -- load


def load_checkpoint(
    engine: ZeroEngine,
    load_dir: str | os.PathLike,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable | None = None,
) -> tuple[str | None, dict]:
    """Restore what `save_checkpoint` wrote, on any number of ranks; every rank must call it.

    Args:
        load_dir: the `save_dir` of the save, or the checkpoint's own folder. tag: which one; default: the latest.
        load_module_strict: the names of the parameters must be the same; else those in common are loaded.
        load_optimizer_states: also the optimizer's state, hyperparameters and loss scale.
        load_lr_scheduler_states: also the learning-rate scheduler.
        load_module_only: nothing but the weights.

    Random states are restored where the world size is the same, unless the folder holds those of the Trainer, which
    restores them itself at the right moment.

    Returns the checkpoint's folder and the client state; (None, {}) if no tag is given and there is no checkpoint.

    Raises:
        ValueError: on every rank, for a damaged file (named, with the newest earlier intact checkpoint), a checkpoint
        that does not fit this model or optimizer, or `custom_load_fn`. OSError: files cannot be read.
    """
    if custom_load_fn is not None:
        raise ValueError("load_checkpoint: custom_load_fn is not supported; load with load_module_strict=False instead")
    wait_for_background_saves()
    ranks, source = Ranks.of(engine.comm, f"loading a checkpoint from {load_dir}"), Path(load_dir)
    folder, of_trainer = ranks.on_first(
        lambda: (folders.locate(source, None if tag is None else str(tag)), any(source.glob("rng_state*.pth")))
    )
    if folder is None:
        if ranks.rank == 0:
            logger.warning("%s: there is no checkpoint", source)
        return None, {}
    description = ranks.together(lambda: folders.read_verified(folder, ranks.rank, ranks.world_size))
    with_optimizer = load_optimizer_states and not load_module_only and engine.optimizer is not None
    names = ranks.together(lambda: _names_to_load(engine, description, load_module_strict))
    if with_optimizer:
        ranks.together(lambda: _check_optimizer(engine, description))
    _read(engine, ranks, folder, names, description["optimizer"] if with_optimizer else None)
    if not load_module_only:
        _restore_progress(engine, description, with_optimizer)
        if load_lr_scheduler_states and engine.lr_scheduler is not None and description["lr_scheduler"] is not None:
            scheduler_state = decode(description["lr_scheduler"])
            ranks.together(lambda: engine.lr_scheduler.load_state_dict(scheduler_state))
        if description["world_size"] == ranks.world_size and not of_trainer:
            state.restore_random_states(description["random_states"][ranks.rank], engine.comm.device)
    return str(folder), decode(description["client_state"])


def _check_optimizer(engine: ZeroEngine, description: dict) -> None:
    """Raise ValueError if the stored optimizer state is not for this optimizer and these parameters."""
    stored, remedy = description["optimizer"], "load with load_optimizer_states=False to start with a fresh state"
    if stored is None:
        raise ValueError(f"the checkpoint holds no optimizer state; {remedy}")
    if not set(stored["classes"]) & set(state.classes_of(engine.optimizer.optimizer)):
        here = type(engine.optimizer.optimizer).__name__
        raise ValueError(f"the checkpoint's optimizer is {stored['classes'][0]}, the present one {here}; {remedy}")
    for name in state.group_of(engine):
        if "group" not in description["parameters"].get(name, {}):
            raise ValueError(f"the checkpoint has no optimizer state for parameter {name!r}; {remedy}")


def _names_to_load(engine: ZeroEngine, description: dict, strict: bool) -> set[str]:
    """Names that the model and the checkpoint have in common.

    Raises ValueError if shapes differ, or, if `strict`, names.
    """
    stored = {name: entry["shape"] for part in ("parameters", "plain") for name, entry in description[part].items()}
    here = {name: list(value.shape) for name, value in state.plain_tensors(engine.module).items()}
    parameters = _parameters(engine)
    here |= {name: entry["shape"] for name, entry in parameters.items()}
    common = here.keys() & stored.keys()
    if different := sorted(name for name in common if here[name] != stored[name]):
        name = different[0]
        raise ValueError(f"parameter {name!r} has shape {stored[name]} in the checkpoint and {here[name]} in the model")
    optional = {name for name, entry in parameters.items() if not entry["trainable"] and description["frozen_excluded"]}
    missing, unexpected = sorted(here.keys() - common - optional), sorted(stored.keys() - common)
    if strict and (missing or unexpected):
        raise ValueError(
            f"the checkpoint does not fit the model: it lacks {_some(missing)} and has {_some(unexpected)} which the "
            "model lacks; load what they have in common with load_module_strict=False"
        )
    return set(common)


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read(engine: ZeroEngine, ranks: Ranks, folder: Path, names: set[str], of_optimizer: dict | None) -> None:
    """Read the weights `names`, and the optimizer's state unless what is said of it is None."""
    if engine.optimizer is not None:
        engine.optimizer.end_updates()

    def read() -> None:
        reader = SliceReader(folder)
        slices = {key: entry for key, entry in state.weights(engine).items() if key.removeprefix("weights/") in names}
        plain = state.plain_tensors(engine.module)
        reader.read(slices | {f"plain/{name}": whole(value) for name, value in plain.items() if name in names})
        if of_optimizer is not None:
            state.read_optimizer_state(engine, of_optimizer["state"], reader)

    ranks.together(read)
    engine.zero_grad()
    for unit in engine.units:
        if unit.master is None:
            unit.invalidate()
        else:
            unit.publish_master()


def _restore_progress(engine: ZeroEngine, description: dict, with_optimizer: bool) -> None:
    by_steps = description["global_steps"] * engine.settings.train_batch_size  # earlier checkpoints do not say
    engine.global_samples = description.get("global_samples", by_steps)
    engine.global_steps, engine.skipped_steps = description["global_steps"], description["skipped_steps"]
    accumulation = engine.settings.gradient_accumulation_steps
    same = accumulation == description["gradient_accumulation_steps"]
    engine.micro_steps = description["micro_steps"] if same else engine.global_steps * accumulation
    if with_optimizer:
        state.restore_group_settings(engine, description)
        if engine.scaler is not None and description["loss_scaler"] is not None:
            engine.scaler.load_state_dict(decode(description["loss_scaler"]))
