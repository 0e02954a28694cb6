"""Predicts the memory and traffic of a training run on each rank, before anything is started.

The engine itself runs two steps, as one of many ranks, on a machine that computes nothing
(`zero/tools/estimate/machine.py`). Every key, tier and optimizer therefore has the same effect as
in a run. The first step creates the optimizer's state, and the second one is measured. A third one
is measured with gradient checkpointing if that was not asked for, or else without.

Not included are torch itself, NCCL's buffers, and fragmentation. An attention mask is counted even
if a kernel would not need one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from zero.build import overlaps_step
from zero.config import Config
from zero.config.offload import OffloadOptimizerConfig
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.integrations.deepspeed.optimizers import build_optimizer
from zero.integrations.deepspeed.tensor import share_model
from zero.optim.sharded_optimizer import ZeroOptimizer
from zero.tools.estimate.adapters import elements
from zero.tools.estimate.machine import DEVICE, DISK, HOST, Memory, imitated
from zero.tools.estimate.model import micro_batch, set_checkpointing, without_values
from zero.tools.estimate.parts import ACTIVATIONS, GRADIENTS, MASTERS, STATE, labelled
from zero.tools.estimate.question import Question
from zero.tools.estimate.teacher import distillation, engine_of, hold_quantized
from zero.tools.estimate.traffic import COMPUTE, FORWARD, OPERATIONS, TOUCHED, Traffic, Update

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
    """Replace "auto" by the values of transformers: sizes from the hidden size, and bf16."""
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
    """Estimate the largest memory of one rank in a step, and what it moves. It is the rank with the
    most memory on its device.

    Raises UsageError for a model whose forward needs inputs other than token ids, if activations
    are asked for."""
    return _estimates(model, config, question, [question.checkpointing])[0]


def estimate_both_ways(
    model: nn.Module, config: Config, question: Question
) -> tuple[Estimate, Estimate]:
    """`estimate`, and the same with gradient checkpointing if it was asked for without, and vice
    versa. It takes less time than two estimates, because one engine is followed.
    """
    asked = question.checkpointing
    found, other = _estimates(model, config, question, [asked, not asked])
    return found, other


def _estimates(
    model: nn.Module, config: Config, question: Question, checkpointing: list[bool]
) -> list[Estimate]:
    if (sharing := config.sequence_parallel_size) > 1 and question.batch:
        raise UsageError(
            f"sequence_parallel_size {sharing}: activations of shared sequences are not estimated. "
            f"Without the key and with --seq {question.length // sharing}, memory is that of a "
            "process whose attention is fused; without --batch and --seq, activations are left out"
        )
    found, owns = _of_rank(model, config, question, 0, checkpointing)
    ranks = [found]
    for rank in range(1, min(question.world_size, OWNERS) if owns else 1):
        ranks.append(_of_rank(model, config, question, rank, checkpointing)[0])
    return [_of_fullest(each, config, question) for each in zip(*ranks, strict=True)]


def _of_fullest(ranks: Sequence[Estimate], config: Config, question: Question) -> Estimate:
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
    model: nn.Module, config: Config, question: Question, rank: int, checkpointing: list[bool]
) -> tuple[list[Estimate], bool]:
    """Return the estimates of one rank, without and with checkpointing as listed, and whether ranks
    own tensors of the optimizer.
    """
    memory, run = Memory(ACTIVATIONS), _as_run(config, question)
    second = config.zero_optimization.zero_hpz_partition_size
    of_machine = second if second and second > 1 else question.world_size
    logger, level = logging.getLogger("zero"), logging.getLogger("zero").level
    model, count = without_values(model), elements(model)
    logger.setLevel(logging.ERROR)
    try:
        with imitated(memory, rank, question.world_size, of_machine), labelled(memory):
            hold_quantized(model, config, memory)
            comm, whole, run = share_model(model, run, None)
            whole.clear()  # the parameters as they were
            optimizer = build_optimizer(run, None, None, model)
            if optimizer is None:
                optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
            engine = ZeroEngine(model.train(), run, optimizer, comm=comm)
            engine.comm.clock.shows = False
            if question.teacher is None:
                loss = micro_batch(engine, question)
            else:
                teacher = engine_of(question.teacher, memory)
                loss = distillation(engine, teacher, question, memory)
            found, is_enabled = [], False
            for is_checkpointed in checkpointing:
                if question.batch and is_checkpointed != is_enabled:
                    set_checkpointing(model, is_checkpointed)
                    is_enabled = is_checkpointed
                found.append(_followed(engine, loss, config, question, memory, count))
            owns = _owns_tensors(engine) and question.world_size > 1
            engine.destroy()
            return found, owns
    finally:
        logger.setLevel(level)


def _followed(
    engine: ZeroEngine,
    loss: Callable[[], torch.Tensor],
    config: Config,
    question: Question,
    memory: Memory,
    elements: int,
) -> Estimate:
    """Run steps until one of them uses the parameters in the order of the step before. Only this
    one counts. The first step of an engine creates the optimizer's state, and no order is known.
    """
    before = _orders(engine) if engine.global_steps else None
    while True:
        memory.forget_peaks()
        memory.forget_most()
        moved = _step(engine, loss, memory)
        if before == (before := _orders(engine)):
            break
    steps = config.gradient_accumulation_steps or 1
    found = Estimate(elements)
    found.tokens = engine.comm.world_size * question.batch * question.length * steps
    found.activations = memory.most[DEVICE, ACTIVATIONS] if question.batch else 0
    found.traffic = Traffic.of(moved, steps)
    if engine.optimizer is not None:
        found.traffic.update = _update(engine, engine.optimizer, config, memory)
        # The norm is computed of the reduced gradients.
        item = engine.reducer.sum_dtype.itemsize
        for shard in engine.optimizer.shards.values():
            found.traffic.computed[TOUCHED] += shard.group.layout.shard_numel * item
    if question.batch:
        found.parts = memory.fullest
    else:
        for (place, part), nbytes in memory.most.items():
            if not part.startswith(ACTIVATIONS):
                found.parts.setdefault(place, {})[part] = nbytes
    found.parts = {
        place: {part: nbytes for part, nbytes in parts.items() if nbytes >= LEAST}
        for place, parts in found.parts.items()
    }
    return found


def _update(engine: ZeroEngine, optimizer: ZeroOptimizer, config: Config, memory: Memory) -> Update:
    """Return the bytes of memory that updates read and write. Gradients are read; masters, state
    and weights without masters are both read and written; other weights are written. Data in
    files passes through host memory. Owned tensors are updated by operations on the device.
    """
    zero = config.zero_optimization
    offload = zero.offload_optimizer or OffloadOptimizerConfig()
    update = Update(
        has_8_bit_moments=zero.zero_quantized_moments,
        is_pipelined=offload.pipeline_read,
    )
    if _owns_tensors(engine):
        update.on_device = memory.done[COMPUTE, TOUCHED]
        return update

    def passes(places: tuple[str, ...], is_offloaded: bool) -> int:
        item = engine.settings.compute_dtype.itemsize
        found = sum(
            shard.group.layout.shard_numel * item * (2 if shard.shares_weights else 1)
            for shard in optimizer.shards.values()
            if shard.is_offloaded == is_offloaded
        )
        for part, times in ((GRADIENTS, 1), (MASTERS, 2), (STATE, 2)):
            found += times * sum(memory.most[place, part] for place in places)
        return found

    update.on_host = passes((HOST, DISK), True)
    if overlaps_step(offload, torch.device("cuda")):
        # A persistent group is updated inside the step.
        offloaded = [shard for shard in optimizer.shards.values() if shard.is_offloaded]
        late = [shard for shard in offloaded if not shard.group.persistent]
        numel, of_late = (
            sum(shard.group.layout.shard_numel for shard in each) for each in (offloaded, late)
        )
        update.late = of_late / max(1, numel)
    update.on_device = passes((DEVICE,), False)
    return update


def _orders(engine: ZeroEngine) -> dict[Any, tuple[int, ...]]:
    """Return the recorded orders of use, from which the engine predicts what to gather next."""
    return {kind: plan.order for kind, plan in engine.schedule.plans.items()}


def _owns_tensors(engine: ZeroEngine) -> bool:
    """Whether each of the optimizer's tensors is updated by a rank that owns it."""
    return engine.optimizer is not None and engine.optimizer.whole is not None


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
