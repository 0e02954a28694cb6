"""Predicts the memory and traffic of a training run on each rank, before anything is started.

The engine itself runs two steps, as one of many ranks, on a machine that computes nothing
(`zero/tools/estimate/machine.py`). Every key, tier and optimizer therefore has the same effect as
in a run. The first step creates the optimizer's state, and the second one is measured.

Not included are torch itself, NCCL's buffers, and fragmentation. An attention mask is counted even
if a kernel would not need one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zero.build import overlaps_step
from zero.config import Config
from zero.config.offload import OffloadOptimizerConfig
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.integrations.deepspeed.optimizers import build_optimizer
from zero.integrations.deepspeed.tensor import share_model
from zero.tools.estimate.adapters import elements, hold_quantized
from zero.tools.estimate.machine import DEVICE, DISK, HOST, Memory, imitated
from zero.tools.estimate.model import enable_checkpointing, micro_batch, without_values
from zero.tools.estimate.parts import ACTIVATIONS, GRADIENTS, MASTERS, STATE, labelled
from zero.tools.estimate.question import Question
from zero.tools.estimate.traffic import (
    COMPUTE,
    FORWARD,
    ON_DEVICE,
    ON_HOST,
    OPERATIONS,
    TOUCHED,
    Traffic,
)

# The number of simulated micro-batches. All between the first and the last are the same.
FOLLOWED = 3
# Parts with fewer bytes are single numbers, such as norms.
LEAST = 256
# The number of ranks that are simulated if single ranks own the optimizer's tensors.
OWNERS = 8


@dataclass
class Estimate:
    """The bytes of one rank by place ("device", "host", "disk") and by part; `elements` counts the
    model's parameters.

    Attributes:
        tokens: the tokens of all ranks in an optimizer step; 0 if unknown.
        activations: their largest size, which need not be reached at the fullest moment.
        traffic: what the rank moves in the step.
        seconds: the seconds of the step: see `Traffic.seconds`.
        has_owners: whether single ranks own tensors of the optimizer, so that ranks differ.
    """

    elements: int
    tokens: int
    activations: int
    has_owners: bool
    traffic: Traffic
    parts: dict[str, dict[str, int]]
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def total(self, place: str) -> int:
        return sum(self.parts[place].values())


def estimate(model: nn.Module, config: Config, question: Question) -> Estimate:
    """Estimate the largest memory of one rank in a step, and what it moves. It is the rank with the
    most memory on its device.

    Raises UsageError for a model whose forward needs inputs other than token ids, if activations
    are asked for."""
    if (sharing := config.sequence_parallel_size) > 1 and question.batch:
        raise UsageError(
            f"sequence_parallel_size {sharing}: activations of shared sequences are not estimated. "
            f"Without the key and with --seq {question.length // sharing}, memory is that of a "
            "process whose attention is fused; without --batch and --seq, activations are left out"
        )
    ranks = [_of_rank(model, config, question, 0)]
    if ranks[0].has_owners:
        others = range(1, min(question.world_size, OWNERS))
        ranks += [_of_rank(model, config, question, rank) for rank in others]
    fullest = max(ranks, key=lambda each: each.total(DEVICE))
    for each in ranks:
        fullest.traffic.widen(each.traffic)
    fullest.seconds = fullest.traffic.seconds(question.speeds, config.compute_dtype.itemsize)
    return fullest


def _as_run(config: Config, question: Question) -> Config:
    """Return the configuration for the imitated run."""
    zero, steps = config.zero_optimization, config.gradient_accumulation_steps or 1
    offload = zero.offload_optimizer
    if offload is not None:  # updates in a thread would not be counted
        changed = {"overlap_step": False}
        zero = zero.model_copy(update={"offload_optimizer": offload.model_copy(update=changed)})
    return config.model_copy(
        update={
            "zero_optimization": zero,
            "train_batch_size": None,
            "train_micro_batch_size_per_gpu": question.batch or 1,
            "gradient_accumulation_steps": min(steps, FOLLOWED),
            "compile": config.compile.model_copy(update={"enabled": False}),
        }
    )


def _of_rank(model: nn.Module, config: Config, question: Question, rank: int) -> Estimate:
    memory, run = Memory(ACTIVATIONS), _as_run(config, question)
    second = config.zero_optimization.zero_hpz_partition_size
    of_machine = second if second and second > 1 else question.world_size
    model = without_values(model)
    count = elements(model)
    with imitated(memory, rank, question.world_size, of_machine), labelled(memory):
        hold_quantized(model, config, memory)
        comm, whole, run = share_model(model, run, None)
        whole.clear()  # the parameters as they were
        optimizer = build_optimizer(run, None, None, model)
        if optimizer is None:
            optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        engine = ZeroEngine(model.train(), run, optimizer, comm=comm)
        engine.comm.clock.shows = False
        loss = micro_batch(engine, question)
        if question.batch and question.checkpointing:
            enable_checkpointing(model)
        moved = _last_step(engine, loss, memory)
        steps = config.gradient_accumulation_steps or 1
        # Without activations there is no fullest moment, but the largest size of each part.
        parts = memory.fullest if question.batch else memory.most
        found = Estimate(
            count,
            tokens=engine.comm.world_size * question.batch * question.length * steps,
            activations=memory.most[DEVICE][ACTIVATIONS] if question.batch else 0,
            has_owners=engine.optimizer is not None and engine.optimizer.whole is not None,
            traffic=_traffic(moved, engine, config, memory),
            parts={
                place: {
                    part: nbytes
                    for part, nbytes in parts[place].items()
                    if nbytes >= LEAST and (question.batch or part != ACTIVATIONS)
                }
                for place in (DEVICE, HOST, DISK)
            },
        )
        engine.destroy()
        return found


def _last_step(
    engine: ZeroEngine, loss: Callable[[], torch.Tensor], memory: Memory
) -> list[Counter[tuple[str, str]]]:
    """Run steps until one of them uses the parameters in the order of the step before. Only this
    one counts; return what it moves. The first step of an engine creates the optimizer's state, and
    no order is known.
    """
    before = None
    while True:
        memory.forget()
        moved = _step(engine, loss, memory)
        # From these, the engine predicts what to gather next.
        orders = {kind: plan.order for kind, plan in engine.schedule.plans.items()}
        if orders == before:
            return moved
        before = orders


def _traffic(
    moved: list[Counter[tuple[str, str]]], engine: ZeroEngine, config: Config, memory: Memory
) -> Traffic:
    """Return what a step moves, with the bytes of memory that updates read and write. Gradients are
    read; masters, state and weights without masters are both read and written; other weights are
    written. Data in files passes through host memory. Owned tensors are updated by operations on
    the device.
    """
    traffic = Traffic.of(moved, config.gradient_accumulation_steps or 1)
    if (optimizer := engine.optimizer) is None:
        return traffic
    offload = config.zero_optimization.offload_optimizer or OffloadOptimizerConfig()
    traffic.has_8_bit_moments = config.zero_optimization.zero_quantized_moments
    traffic.is_pipelined = offload.pipeline_read
    shards = list(optimizer.shards.values())
    # The norm is computed of the reduced gradients.
    norm = engine.reducer.sum_dtype.itemsize
    traffic.computed[TOUCHED] += norm * sum(shard.group.layout.shard_numel for shard in shards)
    if optimizer.whole is not None:
        traffic.computed[ON_DEVICE] = memory.done[COMPUTE, TOUCHED]
        return traffic
    item = engine.settings.compute_dtype.itemsize
    for shard in shards:
        where = ON_HOST if shard.is_offloaded else ON_DEVICE
        times = 2 if shard.shares_weights else 1
        traffic.computed[where] += shard.group.layout.shard_numel * item * times
    for part, times in ((GRADIENTS, 1), (MASTERS, 2), (STATE, 2)):
        traffic.computed[ON_DEVICE] += times * memory.most[DEVICE][part]
        traffic.computed[ON_HOST] += times * (memory.most[HOST][part] + memory.most[DISK][part])
    if overlaps_step(offload, torch.device("cuda")):
        # A persistent group is updated inside the step.
        late: Counter[bool] = Counter()
        for shard in shards:
            if shard.is_offloaded:
                late[not shard.group.persistent] += shard.group.layout.shard_numel
        traffic.late = late[True] / max(1, late.total())
    return traffic


def _step(
    engine: ZeroEngine, loss: Callable[[], torch.Tensor], memory: Memory
) -> list[Counter[tuple[str, str]]]:
    """Run a step, and return what each micro-batch has moved and computed. The last one includes
    the optimizer, but not the bytes that its operations touch, which stay in `memory.done`.
    """
    found: list[Counter[tuple[str, str]]] = []
    for number in range(engine.settings.gradient_accumulation_steps or 1):
        memory.done = Counter()
        value = loss()
        forward = 0 if number else memory.done[COMPUTE, OPERATIONS]
        engine.backward(value)
        touched = memory.done.pop((COMPUTE, TOUCHED), 0)
        engine.step()
        done = {**memory.done, (COMPUTE, FORWARD): forward, (COMPUTE, TOUCHED): touched}
        found.append(Counter(done))
    return found
