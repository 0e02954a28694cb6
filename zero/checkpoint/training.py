"""Training checkpoints: written by any number of ranks, safe against crashes, read by any other
number of ranks.

    save   agree on the name and the size -> rank 0 cleans up and makes a hidden folder -> all
           ranks write their slices -> rank 0 writes `checkpoint.json`, renames the folder and
           updates `latest`
    load   find the folder -> rank 0 checks that all files are there -> compare names and shapes ->
           all ranks read what they need into masters and optimizer state, and verify it -> round
           the masters into the shards, reshard groups or gather them again

If one rank fails, every rank raises the same error.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch

from zero.checkpoint import folder as folders
from zero.checkpoint import resumable, state
from zero.checkpoint.background import BackgroundSaves, wait_for_background_saves
from zero.checkpoint.cuts import PartReader, cuts_of, to_store
from zero.checkpoint.files import SliceReader, Slices, check_sizes, whole, write
from zero.checkpoint.manifest import (
    DATA_FILE,
    FORMAT,
    FORMAT_VERSION,
    DamagedCheckpointError,
    Manifest,
    read_manifest,
)
from zero.checkpoint.model import model_config
from zero.checkpoint.ranks import Ranks
from zero.checkpoint.state import Trained
from zero.checkpoint.values import decode, dtype_name, encode
from zero.errors import UsageError

logger = logging.getLogger("zero")

# An upper bound of the bytes that describe a slice, in its file and in the manifest.
_BYTES_PER_SLICE = 1024


# -- save


def save_checkpoint(
    engine: Trained,
    save_dir: str | os.PathLike,
    tag: str | None = None,
    client_state: dict | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write the training state to `save_dir/tag`; every rank must call it. Returns True.

    Args:
        tag: name of the folder; default `global_stepN`. A checkpoint of that name is replaced.
        client_state: a dict of the caller's, returned by `load_checkpoint`: numbers, strings,
        containers, tensors. save_latest: make it the one that is loaded when no tag is given.
        exclude_frozen_parameters: leave out the weights of parameters that are not trained.

    With `checkpoint.async_save` it returns before the checkpoint is written; see
    `zero.checkpoint.background`.

    Raises:
        OSError: the disk is full or the folder cannot be written to. ValueError: for a bad tag or a
        value that cannot
            be stored. Every rank raises it. The former checkpoints are still there.
    """
    if save_dir is None or not os.fspath(save_dir):
        raise UsageError(f"save_checkpoint: save_dir is {save_dir!r}; name the folder to save to")
    what = f"saving a checkpoint to {save_dir}"
    ranks = Ranks.of(engine.comm.job, what)
    tag = ranks.run(
        lambda: folders.check_tag(f"global_step{engine.global_steps}" if tag is None else str(tag))
    )
    tag = _agreed(tag, ranks, engine.settings.checkpoint.tag_validation)
    # What is in files does not fit into host memory. So it cannot be copied there for a save in the
    # background.
    tiers = [param_group.tier for param_group in engine.groups]
    if engine.optimizer is not None:
        tiers += [shard.tier for shard in engine.optimizer.shards.values()]
    in_files = any(tier.file for tier in tiers)
    background = (
        BackgroundSaves.of(engine)
        if engine.settings.checkpoint.async_save and not in_files
        else None
    )
    if background is not None:
        background.wait()
    if ranks.rank == 0 and any(
        engine.reducer.is_fresh(param_group) for param_group in engine.groups
    ):
        logger.warning(
            "gradients of an unfinished accumulation are not part of the checkpoint %s", tag
        )
    slices, description = _collect(engine, ranks, client_state or {}, exclude_frozen_parameters)
    description["tag"] = tag

    size = sum(entry.nbytes + _BYTES_PER_SLICE * len(entry.parts) for entry in slices.values())
    total = sum(ranks.gather(size)) + len(json.dumps(description))
    folder = Path(ranks.on_first(lambda: str(folders.begin(Path(save_dir), tag, total))))
    if ranks.rank == 0:
        resumable.seal_later(Path(save_dir), ranks.world_size)
    if background is None:
        _finish(ranks, folder, slices, description, save_latest)
    else:
        in_thread = Ranks(background.connection, what)

        def act(copies: dict[str, Slices]) -> None:
            _finish(in_thread, folder, copies, description, save_latest)

        copies = ranks.run(lambda: background.copy(slices))
        background.start(copies, act)
    return True


def _agreed(tag: str, ranks: Ranks, validation: str) -> str:
    """Rank 0's tag.

    Where the ranks gave different ones: UsageError if `validation` is "Fail", a warning if "Warn".
    """
    tags = ranks.gather(tag)
    if validation != "Ignore" and len(set(tags)) > 1:
        message = f"save_checkpoint: the ranks gave different tags: {', '.join(tags)}"
        if validation == "Fail":
            raise UsageError(
                f"{message}; give the same one, or set checkpoint.tag_validation to Warn"
            )
        logger.warning("%s; rank 0's is used", message)
    return tags[0]


def _collect(
    engine: Trained, ranks: Ranks, client_state: dict, exclude_frozen: bool
) -> tuple[dict[str, Slices], dict]:
    """This rank's slices, as views, and the description, the same on all ranks."""

    def collect() -> tuple[dict[str, Slices], dict, dict]:
        slices, kinds = state.weights(engine, exclude_frozen), {}
        if engine.optimizer is not None:
            of_optimizer, kinds = state.optimizer_slices(engine)
            slices |= of_optimizer
        place, size = engine.comm.replicate_group.rank, engine.comm.replicate_group.size
        if engine.settings.zero_optimization.stage == 0:  # all ranks hold all of it
            place, size = engine.comm.rank, engine.comm.world_size
        slices = {
            key: entry.share(place, size) for key, entry in to_store(slices, engine.groups).items()
        }
        return slices, kinds, _describe(engine, client_state, exclude_frozen)

    slices, kinds, description = ranks.run(collect)
    gathered = ranks.gather((kinds, state.random_states(engine.comm.device)))
    description["random_states"] = [states for _, states in gathered]
    earlier = _join_models(engine, ranks, description)
    for name, value in state.plain_tensors(engine.module).items():
        if name not in earlier:
            slices[f"plain/{name}"] = whole(value.contiguous())
    for kinds, _ in gathered:  # a rank whose shards are all padding has no state
        for key, kind in kinds.items():
            merged = description["optimizer"]["state"].setdefault(key, {})
            for part, content in kind.items():
                merged[part] = (
                    merged.get(part, {}) | content if isinstance(content, dict) else content
                )
    return slices, description


def _join_models(engine: Trained, ranks: Ranks, description: dict) -> set[str]:
    """Make `description` that of the whole model, of which ranks may have different parts.

    Returns the names of what lower ranks have as well.
    """
    keys, earlier = ("parameters", "plain", "tied"), set()
    if engine.comm.model is None:
        return set(description["plain"]) if ranks.rank else earlier
    for rank, found in enumerate(ranks.gather({key: description[key] for key in keys})):
        for key in keys:
            description[key] = found[key] | description[key]
        if rank < ranks.rank:
            earlier |= found["plain"].keys()
    return earlier


def _describe(engine: Trained, client_state: dict, exclude_frozen: bool) -> dict:
    """All of `checkpoint.json` that every rank knows."""
    optimizer, scheduler, scaler = engine.optimizer, engine.lr_scheduler, engine.scaler
    description = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "torch": torch.__version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world_size": engine.comm.job.world_size,
        "stage": engine.settings.zero_optimization.stage,
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "global_samples": engine.global_samples,
        "gradient_accumulation_steps": engine.settings.gradient_accumulation_steps,
        "loss_scaler": None if scaler is None else encode(scaler.state_dict(), "loss_scaler"),
        "lr_scheduler": None
        if scheduler is None
        else encode(scheduler.state_dict(), "lr_scheduler"),
        "client_state": encode(client_state, "client_state"),
        "frozen_excluded": exclude_frozen,
        "parameters": _parameters(engine, exclude_frozen),
        "tied": state.tied_names(engine.module),
        "plain": {
            name: {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
            for name, value in state.plain_tensors(engine.module).items()
        },
        "optimizer": None,
        "hf_config": model_config(engine.module),
        "files": {},
        "tensors": {},
    }
    if optimizer is not None:
        groups, classes = state.group_settings(engine), state.classes_of(optimizer.optimizer)
        description["optimizer"] = {"classes": classes, "groups": groups, "state": {}}
        for name, group in state.group_of(engine).items():
            description["parameters"][name]["group"] = group
    return description


def _parameters(engine: Trained, exclude_frozen: bool = False) -> dict[str, dict]:
    """Shape and compute dtype of each sharded parameter, in the model's order."""
    cuts = cuts_of(engine.groups)
    found = {
        name: {
            "shape": list(param.shape),
            "dtype": dtype_name(param_group.dtype),
            "trainable": param_group.trainable,
        }
        | ({"cut": cuts[name].described} if name in cuts else {})
        for param_group in engine.groups
        if param_group.trainable or not exclude_frozen
        for name, param in zip(param_group.param_names, param_group.params, strict=True)
    }
    return {name: found[name] for name, _ in engine.module.named_parameters() if name in found}


def _finish(
    ranks: Ranks, folder: Path, slices: dict[str, Slices], description: dict, latest: bool
) -> None:
    """Write into the folder that `begin` made.

    Then make it visible, or remove it. Every rank must call it.
    """

    def commit() -> None:
        folders.write_placeholders(folder, description["stage"], description["world_size"])
        folders.commit(folder, description["tag"], description, latest=latest)

    try:
        for of_rank in ranks.each(lambda: write(slices, folder, DATA_FILE.format(ranks.rank))):
            description["files"][of_rank["name"]] = of_rank["file"]
            for key, entry in of_rank["tensors"].items():
                tensor = description["tensors"].setdefault(key, entry | {"slices": []})
                tensor["slices"] += entry["slices"]
        ranks.on_first(commit)
    except Exception:
        if ranks.rank == 0:
            folders.abandon(folder)
        raise


# -- load


def load_checkpoint(
    engine: Trained,
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
        load_dir: the `save_dir` of the save, or the checkpoint's own folder. tag: which one;
        default: the latest. load_module_strict: the names of the parameters must be the same; else
        those in common are loaded. load_optimizer_states: also the optimizer's state,
        hyperparameters and loss scale. load_lr_scheduler_states: also the learning-rate scheduler.
        load_module_only: nothing but the weights.

    Random states are restored where the world size is the same, unless the folder holds those of
    the Trainer, which restores them itself at the right moment.

    Returns the checkpoint's folder and the client state; (None, {}) if no tag is given and there is
    no checkpoint.

    Raises:
        ValueError: on every rank, for a damaged file (named, with the newest earlier intact
        checkpoint), a checkpoint that does not fit this model or optimizer, or `custom_load_fn`.
        OSError: files cannot be read.
    """
    if custom_load_fn is not None:
        raise UsageError(
            "load_checkpoint: custom_load_fn is not supported; load with load_module_strict=False "
            "instead"
        )
    wait_for_background_saves()
    ranks, source = (
        Ranks.of(engine.comm.job, f"loading a checkpoint from {load_dir}"),
        Path(load_dir),
    )
    found = ranks.on_first(lambda: resumable.locate_tag(source, tag))
    of_trainer = ranks.on_first(lambda: any(source.glob("rng_state*.pth")))
    if found is None:
        if ranks.rank == 0:
            logger.warning("%s: there is no checkpoint", source)
        return None, {}
    folder = Path(found)
    manifest = ranks.run(lambda: _open(source, folder, ranks))
    with_optimizer = load_optimizer_states and not load_module_only and engine.optimizer is not None
    elsewhere = (
        set().union(*ranks.gather(list(_named(engine)))) if engine.comm.model is not None else set()
    )
    names = ranks.run(lambda: _names_to_load(engine, manifest, load_module_strict, elsewhere))
    if with_optimizer:
        ranks.run(lambda: _check_optimizer(engine, manifest))
    _read(
        engine,
        ranks,
        PartReader(folder, manifest, cuts=cuts_of(engine.groups)),
        names,
        with_optimizer,
    )
    if not load_module_only:
        _restore_progress(engine, manifest, with_optimizer)
        if (
            load_lr_scheduler_states
            and engine.lr_scheduler is not None
            and manifest.lr_scheduler is not None
        ):
            ranks.run(lambda: engine.lr_scheduler.load_state_dict(decode(manifest.lr_scheduler)))
        if manifest.world_size == ranks.world_size and not of_trainer:
            ranks.run(
                lambda: state.restore_random_states(
                    manifest.random_states[ranks.rank], engine.comm.device
                )
            )
    return str(folder), ranks.run(lambda: decode(manifest.client_state))


def _open(source: Path, folder: Path, ranks: Ranks) -> Manifest:
    """The manifest.

    Checks that all files are there; also the Trainer's files, if it has completed its folder.
    """
    try:
        manifest = read_manifest(folder)
        if ranks.rank == 0:
            check_sizes(folder, manifest)
            if source != folder and (source / resumable.TRAINER_STATE).exists():
                resumable.check_resumable(source, ranks.world_size, sums=False)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error}{resumable.offer(folder)}") from error
    return manifest


def _check_optimizer(engine: Trained, manifest: Manifest) -> None:
    """Raise ValueError if the stored optimizer state is not for this optimizer and these
    parameters.
    """
    stored, remedy = (
        manifest.optimizer,
        "load with load_optimizer_states=False to start with a fresh state",
    )
    if stored is None:
        raise UsageError(f"the checkpoint holds no optimizer state; {remedy}")
    if not set(stored.classes) & set(state.classes_of(engine.optimizer.optimizer)):
        here = type(engine.optimizer.optimizer).__name__
        raise UsageError(
            f"the checkpoint's optimizer is {stored.classes[0]}, the present one {here}; {remedy}"
        )
    for name in state.group_of(engine):
        if name not in manifest.parameters or manifest.parameters[name].group is None:
            raise UsageError(
                f"the checkpoint has no optimizer state for parameter {name!r}; {remedy}"
            )


def _named(engine: Trained) -> dict[str, list[int]]:
    """The shapes of all that this rank has of the model, by name."""
    plain = {name: list(value.shape) for name, value in state.plain_tensors(engine.module).items()}
    return plain | {name: entry["shape"] for name, entry in _parameters(engine).items()}


def _names_to_load(
    engine: Trained, manifest: Manifest, strict: bool, elsewhere: set[str]
) -> set[str]:
    """Names that the model and the checkpoint have in common. `elsewhere`: names that some rank
    has.

    Raises ValueError if shapes differ, or, if `strict`, names.
    """
    stored = {name: entry.shape for name, entry in (manifest.parameters | manifest.plain).items()}
    here, parameters = _named(engine), _parameters(engine)
    common = here.keys() & stored.keys()
    if different := sorted(name for name in common if here[name] != stored[name]):
        name = different[0]
        raise UsageError(
            f"parameter {name!r} has shape {stored[name]} in the checkpoint and {here[name]} in "
            "the model"
        )
    optional = {
        name
        for name, entry in parameters.items()
        if not entry["trainable"] and manifest.frozen_excluded
    }
    missing, unexpected = (
        sorted(here.keys() - common - optional),
        sorted(stored.keys() - common - elsewhere),
    )
    if strict and (missing or unexpected):
        raise UsageError(
            f"the checkpoint does not fit the model: it lacks {_some(missing)} and has "
            f"{_some(unexpected)} which the "
            "model lacks; load what they have in common with load_module_strict=False"
        )
    return set(common)


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:3])) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


def _read(
    engine: Trained, ranks: Ranks, reader: SliceReader, names: set[str], with_optimizer: bool
) -> None:
    """Read the weights `names`, and the optimizer's state if wanted."""
    if engine.optimizer is not None:
        engine.optimizer.end_updates()

    def read() -> None:
        slices = {
            key: entry
            for key, entry in state.weights(engine).items()
            if key.removeprefix("weights/") in names
        }
        plain = state.plain_tensors(engine.module)
        slices |= {f"plain/{name}": whole(value) for name, value in plain.items() if name in names}
        try:
            reader.read(slices)
            if with_optimizer:
                state.read_optimizer_state(engine, reader)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{error}{resumable.offer(reader.folder)}") from error

    try:
        ranks.run(read)
    except Exception:
        if engine.optimizer is not None:
            engine.optimizer.spoil(
                "a checkpoint was read in part; load another one before going on"
            )
        raise
    engine.zero_grad()
    shards = {} if engine.optimizer is None else engine.optimizer.shards
    for param_group in engine.groups:
        if param_group in shards:
            shards[param_group].master_was_replaced()
        else:
            param_group.refresh()


def _restore_progress(engine: Trained, manifest: Manifest, with_optimizer: bool) -> None:
    accumulation = engine.settings.gradient_accumulation_steps
    same = accumulation == manifest.gradient_accumulation_steps
    micro_steps = manifest.micro_steps if same else manifest.global_steps * accumulation
    engine.set_progress(
        manifest.global_steps, micro_steps, manifest.skipped_steps, manifest.global_samples
    )
    if with_optimizer:
        state.restore_group_settings(engine, manifest)
        if engine.scaler is not None and manifest.loss_scaler is not None:
            engine.scaler.load_state_dict(decode(manifest.loss_scaler))
