"""One rank of the stages benchmark.

`cost` measures memory in two bf16 steps of each stage with accumulation 2. Then it measures
time in rounds of fp32 steps. The stages take turns, so that a busy machine disturbs all of them
equally. `train` runs a short training in plain torch, and the same one at each stage in fp32
and bf16, for the losses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero
from benchmarks.measuring import PeakMemory, let_go, state_bytes, timed
from benchmarks.models import build, synthetic_batches, t5
from benchmarks.runner import medians
from benchmarks.step.worker import adamw, by_engine, by_torch

STAGES = [0, 1, 2, 3]
ACCUMULATION = 2
WARMUP = 1
MODELS, VOCABULARY = ("t5-42m", "t5-10m"), 8192
# A T5 that learns to repeat 16 tokens out of a vocabulary of 32 in about 200 steps.
TINY = 64, 128, 2, 4, 16, 32
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
    optimizer = adamw(model, lr=lr, weight_decay=0.01)
    return zero.initialize(model=model, optimizer=optimizer, config=config)[0]


# -- memory and time of one stage


def measure_memory(model: str, stage: int) -> dict[str, Any]:
    """Return the model states of the second step: between its micro-batches, and before its
    update.
    """
    let_go()
    batches = synthetic_batches(VOCABULARY, 1, 8, 8, seed=dist.get_rank())
    with PeakMemory("VmRSS") as peak:
        engine = start(build(model), stage, bf16=True, accumulation=ACCUMULATION)
        step = by_engine(engine)
        for _ in range(ACCUMULATION):
            step(next(batches))
        let_go()
        peak.most = peak.first  # building does not count
        step(next(batches))
        between = state_bytes(engine)
        engine.backward(engine(**next(batches)).loss)
        states = state_bytes(engine)
        engine.step()
    engine.destroy()
    return {**states, "accumulated": between["accumulated"], "peak": peak.extra}


def measure_time(model: str, stage: int, batch: int, length: int, steps: int) -> dict[str, Any]:
    """Return the losses in fp32, and the medians of wall and CPU seconds of the counted steps."""
    let_go()
    batches = synthetic_batches(VOCABULARY, batch, length, length, seed=dist.get_rank())
    engine = start(build(model), stage, bf16=False)
    step = by_engine(engine)
    each = [timed(lambda b=b: step(b).item()) for b in islice(batches, WARMUP + steps)]
    engine.destroy()
    costs = medians([cost for cost, _ in each[WARMUP:]])
    return costs | {"losses": [loss for _, loss in each]}


def cost(model: str, rounds: int, **task: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    parameters = sum(parameter.numel() for parameter in build(model).parameters())
    memory = [measure_memory(model, stage) for stage in STAGES]
    found = [[measure_time(model, stage, **task) for stage in STAGES] for _ in range(rounds)]
    return {"parameters": parameters, "memory": memory, "rounds": found}


# -- the short training


def copies(steps: int) -> Iterator[Batch]:
    """Yield random sequences that are their own targets. They are the same on every rank."""
    for batch in islice(synthetic_batches(TINY[-1], ROWS, LENGTH, LENGTH, seed=0), steps):
        yield {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


def train_plain(steps: int, lr: float) -> list[float]:
    """Train on the whole global batch in one process."""
    model = build(t5(*TINY))
    step = by_torch(model, adamw(model, lr=lr, weight_decay=0.01))
    return [step(batch).item() for batch in copies(steps)]


def train_stage(stage: int, bf16: bool, steps: int, lr: float) -> list[float]:
    """Train on this rank's rows of each batch. The losses are means over ranks."""
    engine = start(build(t5(*TINY)), stage, bf16, lr)
    rank, world_size, step = dist.get_rank(), dist.get_world_size(), by_engine(engine)
    losses = [
        step({name: value.chunk(world_size)[rank] for name, value in batch.items()}).item()
        for batch in copies(steps)
    ]
    engine.destroy()
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / world_size).tolist()


def train(steps: int, lr: float) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    curves = {"plain torch, fp32": train_plain(steps, lr)}
    for dtype in ("fp32", "bf16"):
        for stage in STAGES:
            curves[f"stage {stage}, {dtype}"] = train_stage(stage, dtype == "bf16", steps, lr)
    return curves
