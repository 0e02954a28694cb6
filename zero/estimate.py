"""`zero estimate`: what a training will take on each rank, memory and traffic, before anything is started.

The model is built of fake tensors, which have shapes and take no memory. What a rank holds is computed from the units,
as the engine makes them, and from the rules of each stage (`zero/estimate_states.py`). What it holds only for a part of
a step, such as activations and gathered parameters, is followed through one step with fake tensors
(`zero/estimate_step.py`). What it moves: `zero/estimate_traffic.py`.

Not included: torch itself, buffers of NCCL, fragmentation, temporary tensors of the optimizer. An attention mask is
counted, also where a kernel would need none.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers.initialization import no_init_weights

from zero.activation_trace import FAKE, trace
from zero.config import Config, load_config
from zero.errors import UsageError
from zero.estimate_buffers import Staging, make_staging, of_requests, of_updates
from zero.estimate_states import DEVICE, DISK, HOST, Kept, keep
from zero.estimate_step import StepMemory, imagined, without_saved
from zero.estimate_traffic import ASSUMPTION, Traffic, Work, traffic, updates_whole_tensors

# Parts of host memory: buffers for transfers.
PINNED, PAGEABLE = "buffers, pinned", "buffers, pageable"


@dataclass(frozen=True)
class Question:
    """What is estimated. `batch` and `length` are of one micro-batch on one rank; 0: activations are left out."""

    world_size: int
    batch: int = 0
    length: int = 0
    checkpointing: bool = False


@dataclass
class Estimate:
    """Bytes of one rank by place ("device", "host", "disk") and by part; `elements` counts the model's parameters.

    traffic: what the rank moves in an optimizer step.
    """

    elements: int
    traffic: Traffic = field(default_factory=Traffic)
    parts: dict[str, dict[str, int]] = field(default_factory=lambda: {DEVICE: {}, HOST: {}, DISK: {}})

    def add(self, place: str, part: str, nbytes: float) -> None:
        if nbytes:
            self.parts[place][part] = self.parts[place].get(part, 0) + math.ceil(nbytes)

    def total(self, place: str) -> int:
        return sum(self.parts[place].values())


def read_config(source: str) -> transformers.PretrainedConfig:
    """The configuration of a model's folder, or of a file `config.json`. ValueError where there is none."""
    folder = Path(source)
    folder = folder.parent if folder.name == "config.json" else folder
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UsageError(f"{source}: an adapter (adapter_config.json) is not estimated: give its base model's folder")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{source}: expected a model's folder with config.json, or that file")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of any kind: the file is somebody else's
        raise UsageError(f"{source}: {' '.join(str(error).split())}") from error
    if not _class_names(config):
        raise UsageError(f"{folder / 'config.json'}: architectures names no model of transformers")
    return config


def _class_names(config: transformers.PretrainedConfig) -> list[str]:
    kinds = {name: getattr(transformers, name, None) for name in config.architectures or ()}
    model = transformers.PreTrainedModel
    return [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, model)]


def build(config: transformers.PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model, of fake tensors of this dtype. UsageError for one whose constructor asks for values."""
    name = _class_names(config)[0]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # Some models are initialized from values that fake tensors do not have. `init_weights` ties parameters, too.
        with FAKE, no_init_weights():
            model = getattr(transformers, name)(config)
        model.tie_weights()
        return model.train()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(f"{name} cannot be built without values: {error}") from error
    finally:
        torch.set_default_dtype(before)


def fill_in(config: Config, model: transformers.PretrainedConfig) -> Config:
    """Replace "auto" by what transformers writes: sizes from the model's hidden size, and bf16."""
    zero, auto = config.zero_optimization, config.auto
    if "zero_optimization.stage" in auto:
        raise UsageError("zero_optimization.stage is 'auto': give the stage as a number to have it estimated")
    model = model.get_text_config()
    hidden = getattr(model, "hidden_size", None) or getattr(model, "d_model", 0)
    sizes = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": hidden * hidden * 9 // 10,
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    changed = {key: value for key, value in sizes.items() if f"zero_optimization.{key}" in auto}
    config = config.model_copy(update={"zero_optimization": zero.model_copy(update=changed)})
    if "bf16.enabled" in auto and not config.fp16.enabled:
        config = config.model_copy(update={"bf16": config.bf16.model_copy(update={"enabled": True})})
    return config


def estimate(model: nn.Module, config: Config, question: Question) -> Estimate:
    """What one rank holds at most, between the first backward and the end of the step, and what it moves in a step.

    Raises UsageError for a model whose forward needs other inputs than token ids, if activations are asked for.
    """
    if config.tensor_parallel.autotp_size > 1:
        raise UsageError("tensor_parallel.autotp_size: memory with tensor parallelism is not estimated; set it to 1")
    zero, item = config.zero_optimization, config.compute_dtype.itemsize
    second = zero.second_shards_over(question.world_size)
    units = keep(model, config, question.world_size)
    found = Estimate(sum(unit.layout.numel for unit in units))
    for unit in units:
        _add_states(found, config, unit)
        if second and not unit.plan.persistent:
            found.add(DEVICE, "second shards", unit.layout.padded // second * item)
    staging = make_staging(units, item)
    _add_step(found, model, config, question, units, staging)
    _add_buffers(found, config, units, staging)
    return found


def _add_buffers(found: Estimate, config: Config, units: Sequence[Kept], staging: Staging) -> None:
    """Host memory for transfers."""
    rounded, of_files = 0, 0
    if any(unit.offloaded for unit in units) and not updates_whole_tensors(config):
        rounded, of_files = of_updates(units, config)
    found.add(HOST, PINNED, staging.nbytes + rounded)
    found.add(HOST, PAGEABLE, of_files + of_requests(units, config))


def _add_step(
    found: Estimate, model: nn.Module, config: Config, question: Question, units: Sequence[Kept], staging: Staging
) -> None:
    """What is held in a part of the step only, and what the step moves."""
    zero, item, saved = config.zero_optimization, config.compute_dtype.itemsize, 0
    gathers = zero.stage == 3 and (zero.shards_over(question.world_size) > 1 or zero.offloads_params)
    step = StepMemory(units, config, question.world_size, gathers, staging)
    if question.batch and question.length:
        moments = trace(model, question.batch, question.length, question.checkpointing)
        if config.activation_checkpointing.cpu_checkpointing:
            saved = max(moment.live for moment in moments)
            found.add(HOST, "activations", saved)
            moments = without_saved(moments)
        for part, nbytes in step.peak(moments, found.parts[DEVICE].pop("gradients", 0)).items():
            found.add(DEVICE, part, nbytes)
    else:
        step.peak(imagined(model, [unit.plan for unit in units]), 0)
        found.add(DEVICE, "gathered parameters", step.most_gathered * item)
        found.add(DEVICE, "gradients on their way", _most_on_their_way(units, config, question.world_size))
    tokens = question.batch * question.length
    work = Work(2 * found.elements * tokens * (4 if question.checkpointing else 3), saved)
    found.traffic = traffic(model, units, step.gathers, config, question.world_size, work)


def _most_on_their_way(units: Sequence[Kept], config: Config, world_size: int) -> int:
    """Bytes of gradients: one unit's is being made while others are being reduced."""
    trained = [unit.layout.padded for unit in units if unit.trainable]
    if not trained:
        return 0
    in_flight = max(max(trained), min(config.zero_optimization.reduce_bucket_size, sum(trained)))
    return (max(trained) + (in_flight if world_size > 1 else 0)) * config.compute_dtype.itemsize


def _add_states(found: Estimate, config: Config, unit: Kept) -> None:
    """Parameters, gradients, masters and moments of one unit."""
    zero, item, shard = config.zero_optimization, config.compute_dtype.itemsize, unit.layout.shard_numel
    whole = unit.plan.persistent or zero.stage < 3
    found.add(unit.home.weights, "parameters", (unit.layout.padded if whole else shard) * item)
    if not unit.trainable:
        return

    found.add(unit.place(unit.gradient), "gradients", unit.gradient)
    if zero.stage < 2 and (config.gradient_accumulation_steps or 1) > 1:
        found.add(DEVICE, "sums of micro-batches", unit.layout.padded * config.gradient_bytes(sums_have_16_bits=True))
    found.add(unit.home.optimizer, "masters", 0 if unit.shares_weights else unit.master)
    found.add(unit.home.optimizer, "optimizer state", unit.state)


# -- what to change


def _with_zero(**changes: Any) -> Callable[[Config], Config]:
    def change(config: Config) -> Config:
        raw = config.zero_optimization.model_dump(exclude_unset=True) | changes
        return config.model_copy(update={"zero_optimization": type(config.zero_optimization).model_validate(raw)})

    return change


_CPU = {"device": "cpu", "pin_memory": True}
CHANGES = (
    ("zero_optimization.stage 1", lambda c: c.zero_optimization.stage < 1, _with_zero(stage=1)),
    ("zero_optimization.stage 2", lambda c: c.zero_optimization.stage < 2, _with_zero(stage=2)),
    ("zero_optimization.stage 3", lambda c: c.zero_optimization.stage < 3, _with_zero(stage=3)),
    (
        "the optimizer offloaded to cpu",
        lambda c: c.zero_optimization.stage in (1, 2) and not c.zero_optimization.offloads_optimizer,
        _with_zero(offload_optimizer=_CPU),
    ),
    (
        "zero_optimization.stage 3, less kept between uses (stage3_max_live_parameters 0)",
        lambda c: True,
        _with_zero(stage=3, stage3_max_live_parameters=0),
    ),
    (
        "zero_optimization.stage 3 with the optimizer offloaded to cpu",
        lambda c: not c.zero_optimization.offloads_optimizer,
        _with_zero(stage=3, offload_optimizer=_CPU),
    ),
    (
        "zero_optimization.stage 3 with optimizer and parameters offloaded to cpu, stage3_max_live_parameters 0",
        lambda c: not c.zero_optimization.offloads_params,
        _with_zero(stage=3, offload_optimizer=_CPU, offload_param=_CPU, stage3_max_live_parameters=0),
    ),
)


def remedies(model: nn.Module, config: Config, question: Question, device_memory: int) -> list[tuple[str, Estimate]]:
    """Changes after which the device has room, with their estimates: those whose step takes the least time come first.

    Of the changes to the configuration the fastest one is named as it is, with gradient checkpointing, and with smaller
    micro-batches, of which a step then has more.
    """
    steps = (config.gradient_accumulation_steps or 1) * question.batch
    smaller = config.model_copy(update={"gradient_accumulation_steps": steps})
    questions = [("", config, question)]
    if question.batch and not question.checkpointing:
        questions.append(("gradient checkpointing", config, replace(question, checkpointing=True)))
    if question.batch > 1:
        words = f"micro-batch 1, gradient_accumulation_steps {steps} and gradient checkpointing"
        questions.append((words, smaller, replace(question, batch=1, checkpointing=True)))
    found = []
    for extra, given, asked in questions:
        candidates = [("", given), *((name, change(given)) for name, applies, change in CHANGES if applies(given))]
        words = [" and ".join(filter(None, [name, extra])) for name, _ in candidates]
        results = zip(words, [estimate(model, each, asked) for _, each in candidates], strict=True)
        fitting = [each for each in results if each[1].total(DEVICE) <= device_memory]
        found += sorted(fitting, key=_seconds)[:1]
    best, least = [], math.inf
    for each in sorted(found, key=_seconds):  # a slower one must leave more room
        if each[1].total(DEVICE) < least:
            best.append(each)
            least = each[1].total(DEVICE)
    return best


def _seconds(remedy: tuple[str, Estimate]) -> float:
    return remedy[1].traffic.seconds


# -- the command


def pinned(found: Estimate, config: Config) -> int:
    """Bytes of the host memory that is pinned (page-locked) where there is an accelerator. The rest is pageable."""
    zero = config.zero_optimization
    weights = bool(zero.offloads_params and zero.offload_param.pin_memory)
    optimizer = bool(zero.offloads_optimizer and zero.offload_optimizer.pin_memory)
    pins = {"parameters": weights, "activations": True, PINNED: True, PAGEABLE: False}
    return sum(nbytes for part, nbytes in found.parts[HOST].items() if pins.get(part, optimizer))


def report(source: str, config_source: str, question: Question, device_memory: int | None, as_json: bool) -> str:
    """The estimate as text or as a JSON object; ValueError for a model or a configuration that cannot be read."""
    model_config = read_config(source)
    config = fill_in(load_config(config_source, allow_auto=True), model_config)
    if question.batch and config.train_micro_batch_size_per_gpu not in (None, question.batch):
        given = config.train_micro_batch_size_per_gpu
        raise UsageError(f"--batch {question.batch}: {config_source} has train_micro_batch_size_per_gpu {given}")
    config = _with_known_steps(config, question)
    if sys.stderr.isatty():
        print("estimate: one step is followed on fake tensors; large models take up to a minute", file=sys.stderr)
    model = build(model_config, config.compute_dtype)
    found = estimate(model, config, question)
    fits = device_memory is None or found.total(DEVICE) <= device_memory
    better = [] if fits else remedies(model, config, question, device_memory)
    if as_json:
        changes = [
            {"change": name, "device": each.total(DEVICE), "host": each.total(HOST), "seconds": each.traffic.seconds}
            for name, each in better
        ]
        moved = {"traffic": found.traffic.links, "seconds": found.traffic.seconds}
        facts = (
            {"elements": found.elements, "bytes": found.parts, "pinned": pinned(found, config)}
            | moved
            | {"fits": fits, "remedies": changes}
        )
        return json.dumps(facts, indent=2)
    lines = [f"{source}: {found.elements:,} parameters, {question.world_size} ranks, each of them holds at most:"]
    lines += _table(found.parts)
    if host := found.total(HOST):
        locked = pinned(found, config)
        lines.append(f"Of the host memory {_size(locked)} are pinned, and {_size(host - locked)} are pageable.")
    if not question.batch:
        lines.append("Activations are not included: give --batch and --seq.")
    lines.append(f"Each rank moves in a step (micro-batches: {config.gradient_accumulation_steps or 1}):")
    lines += _table(found.traffic.links)
    if fits and device_memory is not None:
        without = "" if question.batch else ", without activations"
        lines.append(f"This fits on a device of {_size(device_memory)}{without}.")
    if not fits:
        largest = max(found.parts[DEVICE], key=found.parts[DEVICE].get)
        lines.append(f"This does not fit on a device of {_size(device_memory)}; the largest part: {largest}.")
        lines += [f"  fits with {_described(*each)}" for each in better]
        unfit = "no change of stage, offload or checkpointing is enough: take fewer tokens, or more ranks"
        lines.append(f"  {ASSUMPTION if better else unfit}")
    return "\n".join(lines)


def _described(change: str, found: Estimate) -> str:
    host = f" and {_size(found.total(HOST))} of host memory" if found.total(HOST) else ""
    return f"{change}: {_size(found.total(DEVICE))}{host}, {found.traffic.seconds:.2g} s a step"


def _with_known_steps(config: Config, question: Question) -> Config:
    """With the accumulation that follows from the batch sizes, if they are known."""
    micro = question.batch or config.train_micro_batch_size_per_gpu
    if config.train_batch_size is None or micro is None:
        return config
    return config.model_copy(update={"train_micro_batch_size_per_gpu": micro}).resolve_batch(question.world_size)


def _table(parts: Mapping[str, Mapping[str, int]]) -> list[str]:
    lines = []
    for place, of_place in parts.items():
        if of_place:
            lines.append(f"  {place:<16}{_size(sum(of_place.values())):>12}")
            lines += [
                f"    {part:<38}{_size(nbytes):>12}" for part, nbytes in sorted(of_place.items(), key=lambda p: -p[1])
            ]
    return lines


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"
