"""One rank of one variant of the checkpoint benchmark: trains one step, then saves a few times and
loads.

`benchmarks.checkpoint` calls `measure` on each rank, in this environment or (variant `deepspeed`)
in one that has DeepSpeed. A variant is a function from a plain model to a `Checkpoints`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measuring import PeakMemory
from benchmarks.models import build, synthetic_batches
from benchmarks.step.worker import adamw, by_engine, by_torch, initialize, shard_by_torch

Batch = dict[str, torch.Tensor]


class Checkpoints(NamedTuple):
    """What a variant can do: a training step, a save (or the start of one), a load, the wait for
    the end of a save.
    """

    step: Callable[[Batch], object]
    save: Callable[[Path], object]
    load: Callable[[Path], object]
    finish: Callable[[], object] | None = None


def by(package: str, model: nn.Module, **sections: Any) -> Checkpoints:
    """This engine, or DeepSpeed."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine = initialize(package, model, config | sections)
    finish = engine.wait_for_checkpoint if sections else None
    return Checkpoints(by_engine(engine), engine.save_checkpoint, engine.load_checkpoint, finish)


def unsynced(model: nn.Module) -> Checkpoints:
    os.fsync = os.fdatasync = lambda descriptor: None
    return by("zero", model)


def dcp(model: nn.Module, asynchronous: bool = False) -> Checkpoints:
    """FSDP2 through torch.distributed.checkpoint and its own state dicts."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    shard_by_torch(model)
    optimizer = adamw(model)
    # DCP's thread must not share the group of the training steps.
    group, in_flight = dist.new_group(backend="gloo"), []

    def state() -> dict[str, Any]:
        weights, of_optimizer = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": of_optimizer}

    def save(folder: Path) -> None:
        if asynchronous:
            in_flight.append(
                checkpoint.async_save(state(), checkpoint_id=folder, process_group=group)
            )
        else:
            checkpoint.save(state(), checkpoint_id=folder)

    def finish() -> None:
        while in_flight:
            in_flight.pop().result()

    def load(folder: Path) -> None:
        found = state()
        checkpoint.load(found, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )

    return Checkpoints(by_torch(model, optimizer), save, load, finish if asynchronous else None)


VARIANTS: dict[str, Callable[[nn.Module], Checkpoints]] = {
    "ours": lambda model: by("zero", model),
    "ours-unsynced": unsynced,
    "ours-async": lambda model: by("zero", model, checkpoint={"async_save": True}),
    "dcp": dcp,
    "dcp-async": lambda model: dcp(model, asynchronous=True),
    "deepspeed": lambda model: by("deepspeed", model),
}


def until_all(act: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - start


def save(variant: Checkpoints, folder: Path, batch: Batch) -> dict[str, float]:
    """Run a step, a save and a step. Return seconds, bytes and extra memory (bytes)."""
    step_before = until_all(lambda: variant.step(batch))
    if dist.get_rank() == 0:
        os.sync()  # write what earlier saves have left, so that it does not count here
    dist.barrier()
    with PeakMemory() as memory:
        start = time.perf_counter()
        variant.save(folder)
        blocked = time.perf_counter() - start
        dist.barrier()
        total = time.perf_counter() - start
        step_after = until_all(lambda: variant.step(batch))
        if variant.finish is not None:
            variant.finish()
            dist.barrier()
            total = time.perf_counter() - start
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    seconds = {"blocked": blocked, "step before": step_before, "step after": step_after}
    return seconds | {"total": total, "bytes": nbytes, "memory": memory.extra}


def forget(folder: Path) -> None:
    """Take the files out of the page cache, because a run that resumes does not find them there."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(variant: str, folder: str, saves: int, model: str) -> dict[str, Any]:
    built = build(model)
    parameters, vocabulary = built.num_parameters(), built.config.vocab_size
    made = VARIANTS[variant](built)
    rank = dist.get_rank()
    batches = synthetic_batches(vocabulary, 1, 8, 8, seed=rank)
    made.step(next(batches))
    found = []
    for number in range(saves):
        if number and rank == 0:
            shutil.rmtree(Path(folder, str(number - 1)))
        found.append(save(made, Path(folder, str(number)), next(batches)))
    dist.barrier()
    if rank == 0:
        forget(Path(folder))
    last = Path(folder, str(saves - 1))
    cold, load = (until_all(lambda: made.load(last)) for _ in range(2))
    return {"parameters": parameters, "saves": found, "load": load, "cold": cold}
