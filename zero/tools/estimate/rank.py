"""Predicts what a training run takes on each rank, in memory and traffic, before anything is
started.

The engine itself runs two steps, as one of many ranks, on a machine that computes nothing
(`zero/tools/estimate/machine.py`). So each key, tier and optimizer has the effect that it has in a
run. The first step makes the optimizer's state, the second one is measured.

Not included: torch itself, buffers of NCCL, fragmentation. An attention mask is counted, also where
a kernel would need none."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from torch import nn

from zero.config import Config
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.integrations.deepspeed.optimizers import build_optimizer
from zero.optim.sharded_optimizer import ZeroOptimizer
from zero.tools.estimate.machine import DEVICE, DISK, HOST, Memory, imitated
from zero.tools.estimate.model import enable_checkpointing, micro_batch, without_values
from zero.tools.estimate.parts import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    MASTERS,
    STATE,
    labelled,
)
from zero.tools.estimate.question import Question
from zero.tools.estimate.traffic import Traffic

# Micro-batches that are followed: all between the first and the last are alike.
FOLLOWED = 3
# Parts of fewer bytes are numbers, such as norms.
LEAST = 256
# Ranks that are followed where the optimizer's tensors are owned by single ranks.
OWNERS = 8


@dataclass
class Estimate:
    """Bytes of one rank by place ("device", "host", "disk") and by part; `elements` counts the
    model's parameters.

    Attributes:
        tokens: of all ranks in an optimizer step; 0: unknown.
        activations: at their most, which need not be the fullest moment.
        traffic: what the rank moves in the step.
        seconds: of the step, if nothing overlaps.
    """

    elements: int
    tokens: int = 0
    seconds: float = 0.0
    activations: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    parts: dict[str, dict[str, int]] = field(
        default_factory=lambda: {DEVICE: {}, HOST: {}, DISK: {}}
    )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def total(self, place: str) -> int:
        return sum(self.parts[place].values())


def fill_in(config: Config, model: transformers.PretrainedConfig) -> Config:
    """Replace "auto" by what transformers writes: sizes from the model's hidden size, and bf16."""
    zero, auto = config.zero_optimization, config.origin.auto
    if "zero_optimization.stage" in auto:
        raise UsageError(
            "zero_optimization.stage is 'auto': give the stage as a number to have it estimated"
        )
    text = model.get_text_config()
    hidden = getattr(text, "hidden_size", None) or getattr(text, "d_model", 0)
    sizes = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": hidden * hidden * 9 // 10,
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    changed = {key: value for key, value in sizes.items() if f"zero_optimization.{key}" in auto}
    config = config.model_copy(update={"zero_optimization": zero.model_copy(update=changed)})
    if "bf16.enabled" in auto and not config.fp16.enabled:
        config = config.model_copy(
            update={"bf16": config.bf16.model_copy(update={"enabled": True})}
        )
    return config


def estimate(model: nn.Module, config: Config, question: Question) -> Estimate:
    """What one rank holds at most in a step, and what it moves in a step. The rank is the one that
    holds most on its device.

    Raises UsageError for a model whose forward needs other inputs than token ids, if activations
    are asked for."""
    if config.tensor_parallel.autotp_size > 1:
        raise UsageError(
            "tensor_parallel.autotp_size: memory with tensor parallelism is not estimated; set it "
            "to 1"
        )
    found, owns = _of_rank(model, config, question, 0)
    ranks = min(question.world_size, OWNERS) if owns else 1
    others = [_of_rank(model, config, question, rank)[0] for rank in range(1, ranks)]
    fullest = max([found, *others], key=lambda each: each.total(DEVICE))
    for each in [found, *others]:
        fullest.traffic.widen(each.traffic)
    fullest.seconds = fullest.traffic.seconds(question.speeds)
    return fullest


def _as_run(config: Config, question: Question) -> Config:
    """The configuration for the imitated run."""
    zero, steps = config.zero_optimization, config.gradient_accumulation_steps or 1
    offload = zero.offload_optimizer
    if offload is not None:  # updates in a thread would not be counted
        changed = {"overlap_step": False} | ({"ratio": 1.0} if offload.ratio == "auto" else {})
        zero = zero.model_copy(update={"offload_optimizer": offload.model_copy(update=changed)})
    batch = {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": question.batch or 1,
        "gradient_accumulation_steps": min(steps, FOLLOWED),
    }
    plain = {"compile": config.compile.model_copy(update={"enabled": False})}
    return config.model_copy(update={"zero_optimization": zero} | batch | plain)


def _of_rank(
    model: nn.Module, config: Config, question: Question, rank: int
) -> tuple[Estimate, bool]:
    """The estimate of one rank, and whether ranks own tensors of the optimizer."""
    memory, run = Memory(ACTIVATIONS), _as_run(config, question)
    second = config.zero_optimization.zero_hpz_partition_size
    of_machine = second if second and second > 1 else question.world_size
    logger, level = logging.getLogger("zero"), logging.getLogger("zero").level
    model = without_values(model)
    logger.setLevel(logging.ERROR)
    try:
        with imitated(memory, rank, question.world_size, of_machine), labelled(memory):
            if question.checkpointing and question.batch:
                enable_checkpointing(model)
            optimizer = build_optimizer(run, None, None, model)
            if optimizer is None:
                optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
            engine = ZeroEngine(model.train(), run, optimizer)
            engine.comm.clock.shows = False
            found = _followed(engine, config, question, memory)
            owns = _owns_tensors(engine) and question.world_size > 1
            engine.destroy()
            return found, owns
    finally:
        logger.setLevel(level)


def _followed(engine: ZeroEngine, config: Config, question: Question, memory: Memory) -> Estimate:
    """Run two steps; the second one is what counts."""
    loss = micro_batch(engine, question)
    memory.forget_peaks()
    _step(engine, loss, memory)
    memory.forget_most()
    moved = _step(engine, loss, memory)
    steps = config.gradient_accumulation_steps or 1
    found = Estimate(sum(group.layout.numel for group in engine.groups))
    found.tokens = engine.comm.world_size * question.batch * question.length * steps
    found.activations = memory.most[DEVICE, ACTIVATIONS] if question.batch else 0
    found.traffic = Traffic.of(moved, steps)
    if engine.optimizer is not None and not _owns_tensors(engine):
        found.traffic.updated = _updated(engine, engine.optimizer, memory)
    if question.batch:
        found.parts = memory.fullest
    else:
        for (place, part), nbytes in memory.most.items():
            if part != ACTIVATIONS:
                found.parts.setdefault(place, {})[part] = nbytes
        item = engine.settings.compute_dtype.itemsize
        found.parts[DEVICE][GATHERED] = engine.residency.peak * item
    found.parts = {
        place: {part: nbytes for part, nbytes in parts.items() if nbytes >= LEAST}
        for place, parts in found.parts.items()
    }
    return found


def _updated(engine: ZeroEngine, optimizer: ZeroOptimizer, memory: Memory) -> int:
    """Bytes of host memory that the updates of offloaded shards read and write: gradients are read,
    masters and state both read and written, and so are weights that are masters; others are
    written. What is in files passes through host memory.
    """

    def most(part: str) -> int:
        return memory.most[HOST, part] + memory.most[DISK, part]

    offloaded = [shard for shard in optimizer.shards.values() if shard.is_offloaded]
    item = engine.settings.compute_dtype.itemsize
    weights = sum(
        shard.group.layout.shard_numel * item * (2 if shard.shares_weights else 1)
        for shard in offloaded
    )
    return weights + most(GRADIENTS) + 2 * most(MASTERS) + 2 * most(STATE)


def _owns_tensors(engine: ZeroEngine) -> bool:
    """Whether each tensor of the optimizer is updated by a rank that owns it."""
    return engine.optimizer is not None and engine.optimizer.whole is not None


Moved = tuple[Counter[tuple[str, str]], int]


def _step(engine: ZeroEngine, loss: Callable[[], torch.Tensor], memory: Memory) -> list[Moved]:
    """Run a step. Returns what each micro-batch has moved and computed; the last one has the
    optimizer's part.
    """
    found: list[Moved] = []
    for _ in range(engine.settings.gradient_accumulation_steps or 1):
        memory.moved, memory.operations = Counter(), 0
        engine.backward(loss())
        engine.step()
        found.append((memory.moved, memory.operations))
    return found
