"""One rank of the stages benchmark, started by `benchmarks.stages` on each rank.

`--task cost` measures memory in two bf16 steps of each stage with accumulation 2. Then it measures
time in rounds of fp32 steps. The stages take turns, so that a busy machine disturbs all of them
equally. `--task train` runs a short training in plain torch, and the same one at each stage in fp32
and bf16, for the losses."""

from __future__ import annotations

import argparse
import ctypes
import gc
import resource
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

import zero
from benchmarks.launch import report
from benchmarks.models import T5_42M, build_t5, synthetic_batches

BUILD_SEED = 1
STAGES = [0, 1, 2, 3]
ACCUMULATION = 2
WARMUP = 1
# A T5 that learns to repeat 16 tokens out of a vocabulary of 32 in about 200 steps.
T5_TINY = {
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "vocab_size": 32,
}
ROWS, LENGTH = 32, 6

Batch = dict[str, torch.Tensor]


def start(
    model: nn.Module, stage: int, bf16: bool, lr: float = 1e-4, accumulation: int = 1
) -> zero.ZeroEngine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        # Nothing is persistent, because the formula shards everything.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zero.initialize(model=model, optimizer=adamw(model, lr), config=config)[0]


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def train_step(engine: zero.ZeroEngine, batch: Batch) -> float:
    """Run one micro-batch, and return its loss."""
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


# -- memory and time of one stage


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """Return the bytes of each distinct storage by its address: `shard` may be a part of `full`."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def state_bytes(engine: zero.ZeroEngine) -> dict[str, int]:
    """Return the bytes of model states that this rank holds now. No storage counts twice."""
    groups, shards = engine.groups, engine.optimizer.shards.values()
    moments = [
        value
        for state in engine.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    parts = {
        "parameters": bytes_of(tensor for group in groups for tensor in (group.full, group.shard)),
        "gradients": bytes_of(shard.grad for shard in shards),
        "accumulated": bytes_of(engine.reducer.gradients[group].carried for group in groups),
        "optimizer": bytes_of([*(shard.master for shard in shards), *moments]),
    }
    for address in parts["parameters"]:
        parts["optimizer"].pop(address, None)  # in fp32 a master is the parameter itself
    return {name: sum(found.values()) for name, found in parts.items()}


class PeakMemory:
    """A context that samples this process's resident memory. `bytes` is the largest sample."""

    def __enter__(self) -> PeakMemory:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        process = psutil.Process()
        while not self._done.wait(0.005):
            self.bytes = max(self.bytes, process.memory_info().rss)

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()


def let_go() -> None:
    """Free the last engine, which is in reference cycles, and give its memory back to the
    system.
    """
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)


def measure_memory(stage: int) -> dict[str, Any]:
    """Return the model states of the second step: between its micro-batches, and before its
    update.
    """
    let_go()
    held_before = psutil.Process().memory_info().rss
    batches = synthetic_batches(T5_42M["vocab_size"], 1, 8, 8, seed=dist.get_rank())
    engine = start(build_t5(T5_42M, BUILD_SEED), stage, bf16=True, accumulation=ACCUMULATION)
    for _ in range(ACCUMULATION):
        train_step(engine, next(batches))
    with PeakMemory() as peak:
        train_step(engine, next(batches))
        between = state_bytes(engine)
        engine.backward(engine(**next(batches)).loss)
        states = state_bytes(engine)
        engine.step()
    engine.destroy()
    return {**states, "accumulated": between["accumulated"], "peak": peak.bytes - held_before}


def measure_time(stage: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return losses, and wall and CPU seconds of this process for each counted step, in fp32."""
    let_go()
    batches = synthetic_batches(
        T5_42M["vocab_size"], args.batch, args.length, args.length, seed=dist.get_rank()
    )
    engine = start(build_t5(T5_42M, BUILD_SEED), stage, bf16=False)
    losses, wall, cpu = [], [], []
    for batch in islice(batches, WARMUP + args.steps):
        dist.barrier()
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        losses.append(train_step(engine, batch))
        wall.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    engine.destroy()
    return {"losses": losses, "wall": wall[WARMUP:], "cpu": cpu[WARMUP:]}


def cost(args: argparse.Namespace) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in build_t5(T5_42M, BUILD_SEED).parameters())
    memory = [measure_memory(stage) for stage in STAGES]
    rounds = [[measure_time(stage, args) for stage in STAGES] for _ in range(args.rounds)]
    return {"parameters": parameters, "memory": memory, "rounds": rounds}


# -- the short training


def copies(steps: int, rows: int) -> Iterator[Batch]:
    """Yield random sequences that are their own targets. They are the same on every rank."""
    for batch in islice(
        synthetic_batches(T5_TINY["vocab_size"], rows, LENGTH, LENGTH, seed=0), steps
    ):
        yield {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


def train_plain(steps: int, lr: float) -> list[float]:
    """Train on the whole global batch in one process."""
    model, losses = build_t5(T5_TINY, BUILD_SEED), []
    optimizer = adamw(model, lr)
    for batch in copies(steps, ROWS):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_stage(stage: int, bf16: bool, steps: int, lr: float) -> list[float]:
    """Train on this rank's rows of each batch. The losses are means over ranks."""
    engine = start(build_t5(T5_TINY, BUILD_SEED), stage, bf16, lr)
    rank, world_size, losses = dist.get_rank(), dist.get_world_size(), []
    for batch in copies(steps, ROWS):
        loss = train_step(
            engine, {name: value.chunk(world_size)[rank] for name, value in batch.items()}
        )
        losses.append(loss)
    engine.destroy()
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / world_size).tolist()


def train(args: argparse.Namespace) -> dict[str, Any]:
    curves = {"plain torch, fp32": train_plain(args.steps, args.learning_rate)}
    for dtype in ("fp32", "bf16"):
        for stage in STAGES:
            name = f"stage {stage}, {dtype}"
            curves[name] = train_stage(stage, dtype == "bf16", args.steps, args.learning_rate)
    return {"curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["cost", "train"], required=True)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    report(cost(args) if args.task == "cost" else train(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
