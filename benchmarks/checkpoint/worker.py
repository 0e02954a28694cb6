"""One rank of one variant of the checkpoint benchmark: trains one step, then saves a few times and
loads.

`benchmarks.checkpoint` starts it on each rank, in this environment or (variant `deepspeed`) in one
that has DeepSpeed. A variant is a function from a plain model to a `Checkpoints`."""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import models
from benchmarks.launch import report
from benchmarks.models import build_t5, synthetic_batches

BUILD_SEED = 1


@dataclass
class Checkpoints:
    """What a variant can do: a training step, a save (or the start of one), the wait for its end, a
    load.
    """

    step: Callable[[dict[str, torch.Tensor]], None]
    save: Callable[[Path], None]
    finish: Callable[[], None] | None
    load: Callable[[Path], None]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _engine(package: Any, model: nn.Module, sections: dict[str, Any]) -> Any:
    """`package` is `zero` or the real `deepspeed`. Both have this interface."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        # torch's fused AdamW is not in DeepSpeed's list of tested optimizers.
        "zero_allow_untested_optimizer": True,
        **sections,
    }
    package.comm.init_distributed(dist_backend="gloo")
    return package.initialize(model=model, optimizer=adamw(model), config=config)[0]


def _step_of(engine: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    def step(batch: dict[str, torch.Tensor]) -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return step


def ours(model: nn.Module) -> Checkpoints:
    import zero

    engine = _engine(zero, model, {})
    return Checkpoints(_step_of(engine), engine.save_checkpoint, None, engine.load_checkpoint)


def ours_unsynced(model: nn.Module) -> Checkpoints:
    os.fsync = os.fdatasync = lambda descriptor: None
    return ours(model)


def ours_async(model: nn.Module) -> Checkpoints:
    import zero

    engine = _engine(zero, model, {"checkpoint": {"async_save": True}})
    return Checkpoints(
        _step_of(engine), engine.save_checkpoint, engine.wait_for_checkpoint, engine.load_checkpoint
    )


def deepspeed(model: nn.Module) -> Checkpoints:
    import deepspeed

    engine = _engine(deepspeed, model, {})
    return Checkpoints(_step_of(engine), engine.save_checkpoint, None, engine.load_checkpoint)


def dcp(model: nn.Module, asynchronous: bool = False) -> Checkpoints:
    """FSDP2, `fully_shard` on each block and the root, through torch.distributed.checkpoint and its
    own state dicts.
    """
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [*model.encoder.block, *model.decoder.block]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    # DCP's thread must not share the group of the training steps.
    group, in_flight = dist.new_group(backend="gloo"), []

    def step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

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

    return Checkpoints(step, save, finish if asynchronous else None, load)


VARIANTS = {
    "ours": ours,
    "ours-unsynced": ours_unsynced,
    "ours-async": ours_async,
    "dcp": dcp,
    "dcp-async": lambda model: dcp(model, asynchronous=True),
    "deepspeed": deepspeed,
}


class PeakMemory:
    """The largest growth of this process's anonymous memory inside of the context, in bytes."""

    def __enter__(self) -> PeakMemory:
        self.first = self.most = _anonymous_memory()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, _anonymous_memory())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.extra = self.most - self.first


def _anonymous_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this benchmark needs Linux")


def timed(act: Callable[[], None]) -> float:
    """Return the seconds until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - start


def measure(
    variant: Checkpoints, folder: Path, batch: dict[str, torch.Tensor], rank: int
) -> dict[str, float]:
    """Run a step, a save and a step. Return seconds, bytes and extra memory (bytes)."""
    step_before = timed(lambda: variant.step(batch))
    if rank == 0:
        os.sync()  # write what earlier saves have left, so that it does not count here
    dist.barrier()
    with PeakMemory() as memory:
        start = time.perf_counter()
        variant.save(folder)
        blocked = time.perf_counter() - start
        dist.barrier()
        total = time.perf_counter() - start
        step_after = timed(lambda: variant.step(batch))
        if variant.finish is not None:
            variant.finish()
            dist.barrier()
            total = time.perf_counter() - start
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "blocked": blocked,
        "step before": step_before,
        "step after": step_after,
        "total": total,
        "bytes": nbytes,
        "memory": memory.extra,
    }


def forget(folder: Path) -> None:
    """Take the files out of the page cache, because a run that resumes does not find them there."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    model = build_t5(getattr(models, args.model), BUILD_SEED)
    parameters = model.num_parameters()
    variant = VARIANTS[args.variant](model)
    rank = dist.get_rank()
    batches = synthetic_batches(getattr(models, args.model)["vocab_size"], 1, 8, 8, seed=rank)
    variant.step(next(batches))
    saves = []
    for number in range(args.saves):
        if number and rank == 0:
            shutil.rmtree(args.folder / str(number - 1))
        saves.append(measure(variant, args.folder / str(number), next(batches), rank))
    dist.barrier()
    if rank == 0:
        forget(args.folder)
    cold, load = (timed(lambda: variant.load(args.folder / str(args.saves - 1))) for _ in range(2))
    report({"parameters": parameters, "saves": saves, "load": load, "cold": cold})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
