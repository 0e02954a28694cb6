"""`zero estimate`: how much memory a training will take on each rank, before anything is started.

The model is built of fake tensors, which have shapes and take no memory. What a rank holds is computed from the units,
as the engine makes them, and from the rules of each stage. What it holds only for a part of a step, such as activations
and gathered parameters, is followed through one step with fake tensors (`zero/estimate_step.py`).

Not included: torch itself, buffers of NCCL, fragmentation, temporary tensors of the optimizer. An attention mask is
counted, also where a kernel would need none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers.initialization import no_init_weights

from zero.activation_trace import FAKE, trace
from zero.config import Config, load_config
from zero.config.settings import ZeroConfig
from zero.deepspeed.optimizers import build_optimizer
from zero.errors import UsageError
from zero.estimate_step import StepMemory, gathered_peak, without_saved
from zero.layout import UnitLayout, UnitPlan, plan_units
from zero.offload.tiers import LEAST_BYTES_IN_A_FILE
from zero.optim.moments import nbytes as coded_bytes
from zero.optim.muon import is_hidden_matrix

DEVICE, HOST, DISK = "device", "host", "disk"


@dataclass(frozen=True)
class Question:
    """What is estimated. `batch` and `length` are of one micro-batch on one rank; 0: activations are left out."""

    world_size: int
    batch: int = 0
    length: int = 0
    checkpointing: bool = False


@dataclass
class Estimate:
    """Bytes of one rank by place ("device", "host", "disk") and by part; `elements` counts the model's parameters."""

    elements: int
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
    """What one rank holds at most, between the first backward and the end of the step.

    Raises UsageError for a model whose forward needs other inputs than token ids, if activations are asked for.
    """
    if config.tensor_parallel.autotp_size > 1:
        raise UsageError("tensor_parallel.autotp_size: memory with tensor parallelism is not estimated; set it to 1")
    zero = config.zero_optimization
    ranks, second = zero.shards_over(question.world_size), zero.second_shards_over(question.world_size)
    threshold = zero.stage3_param_persistence_threshold if zero.stage == 3 else 0
    plans = plan_units(model, threshold, zero.stage3_model_persistence_threshold)
    layouts = {
        plan.name + str(number): UnitLayout([param.shape for param in plan.params], ranks, replicated=zero.stage == 0)
        for number, plan in enumerate(plans)
    }
    found = Estimate(sum(layout.numel for layout in layouts.values()))
    places = homes(plans, list(layouts.values()), config)
    for plan, layout, home in zip(plans, layouts.values(), places, strict=True):
        _add_states(found, config, plan, layout, home)
        if second and not plan.persistent:
            found.add(DEVICE, "second shards", layout.padded // second * config.compute_dtype.itemsize)
    item = config.compute_dtype.itemsize
    gathers = zero.stage == 3 and (ranks > 1 or zero.offloads_params)
    if question.batch and question.length:
        moments = trace(model, question.batch, question.length, question.checkpointing)
        step = StepMemory(model, plans, list(layouts.values()), config, question.world_size, gathers)
        if config.activation_checkpointing.cpu_checkpointing:
            found.add(HOST, "activations", max(moment.live for moment in moments))
            moments = without_saved(moments)
        for part, nbytes in step.peak(moments, found.parts[DEVICE].pop("gradients", 0)).items():
            found.add(DEVICE, part, nbytes)
        return found
    if gathers:
        peak = gathered_peak(model, plans, list(layouts.values()), config)
        found.add(DEVICE, "gathered parameters", peak * item)
    trained = [
        layout.padded for plan, layout in zip(plans, layouts.values(), strict=True) if plan.params[0].requires_grad
    ]
    if trained:
        # One unit's gradient is being made while others are being reduced.
        in_flight = max(max(trained), min(zero.reduce_bucket_size, sum(trained)))
        found.add(
            DEVICE, "gradients on their way", (max(trained) + (in_flight if question.world_size > 1 else 0)) * item
        )
    return found


class Home(NamedTuple):
    """Where the weights of a unit live between their uses, and what the optimizer keeps of it."""

    weights: str
    optimizer: str


def homes(plans: Sequence[UnitPlan], layouts: Sequence[UnitLayout], config: Config) -> Iterator[Home]:
    """The home of each unit. Of weights for files, the first `max_in_cpu` elements of a rank stay in host memory."""
    zero, item = config.zero_optimization, config.compute_dtype.itemsize
    in_memory = zero.offload_param.max_in_cpu if zero.offloads_params and zero.offload_param.device == "nvme" else 0
    for plan, layout in zip(plans, layouts, strict=True):
        in_memory -= layout.numel // layout.world_size
        weights = optimizer = DEVICE
        if zero.offloads_params and zero.stage == 3 and not plan.persistent:
            weights = _place(zero.offload_param.device, layout.shard_numel * item)
            weights = HOST if in_memory >= 0 else weights
        if zero.offloads_optimizer and zero.stage:
            optimizer = _place(zero.offload_optimizer.device, layout.shard_numel * 4)
        yield Home(weights, optimizer)


def _add_states(found: Estimate, config: Config, plan: UnitPlan, layout: UnitLayout, homes: Home) -> None:
    """Parameters, gradients, masters and moments of one unit."""
    zero, item = config.zero_optimization, config.compute_dtype.itemsize
    persistent, shard = plan.persistent or zero.stage < 3, layout.shard_numel
    home, place = homes
    found.add(home, "parameters", (layout.padded if persistent else shard) * item)
    if not plan.params[0].requires_grad:
        return
    ratio = 1.0
    if place != DEVICE and zero.offload_optimizer.ratio != "auto":
        ratio = zero.offload_optimizer.ratio
    gradient = config.gradient_bytes(sums_have_16_bits=True)

    def add(part: str, nbytes: float) -> None:
        found.add(place, part, nbytes * ratio)
        found.add(DEVICE, part, nbytes * (1 - ratio))

    add("gradients", shard * gradient)
    if zero.stage < 2 and (config.gradient_accumulation_steps or 1) > 1:
        found.add(DEVICE, "sums of micro-batches", layout.padded * gradient)
    master = 2 if config.bf16.without_masters else 4
    found.add(place, "masters", 0 if item == master and _is_own_master(zero, home, place) else shard * master * ratio)
    found.add(DEVICE, "masters", 0 if item == master and home == DEVICE else shard * master * (1 - ratio))
    moment = 2 if config.bf16.without_masters and config.bf16.bf16_optimizer_states else 4
    state = coded_bytes(shard) if zero.zero_quantized_moments else shard * moment
    add("optimizer state", state * _moments(config, plan))


def _is_own_master(zero: ZeroConfig, home: str, place: str) -> bool:
    """Whether a shard at `home`, in the masters' dtype, is the master at `place`; see `OptimizerShard.make_master`."""
    if home == DISK:
        return place == DISK and zero.offload_param.nvme_path == zero.offload_optimizer.nvme_path
    return home == place or (home, place) == (HOST, DISK)


def _moments(config: Config, plan: UnitPlan) -> float:
    """Values of the optimizer's state for each parameter element. Without a section: AdamW, the Trainer's own."""
    if config.optimizer is None:
        return 2
    if config.optimizer.type == "Muon":  # and AdamW for all but the hidden matrices
        matrices = sum(
            p.numel() for p, name in zip(plan.params, plan.param_names, strict=True) if is_hidden_matrix(p, name)
        )
        return 2 - matrices / sum(param.numel() for param in plan.params)
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    optimizer = build_optimizer(config, None, [param], nn.Module())
    optimizer.step()
    return sum(value.dim() for value in optimizer.state[param].values() if isinstance(value, torch.Tensor))


def _place(device: str, nbytes: int) -> str:
    """Where a tensor of this size is offloaded to: small ones stay in host memory."""
    return DISK if device == "nvme" and nbytes >= LEAST_BYTES_IN_A_FILE else HOST


# -- what to change


def _with_zero(**changes: Any) -> Callable[[Config], Config]:
    def change(config: Config) -> Config:
        raw = config.zero_optimization.model_dump(exclude_unset=True) | changes
        return config.model_copy(update={"zero_optimization": type(config.zero_optimization).model_validate(raw)})

    return change


_CPU = {"device": "cpu", "pin_memory": True}
# From what costs the least time to what costs the most, by the bytes that they move.
CHANGES = (
    ("zero_optimization.stage 1", lambda c: c.zero_optimization.stage < 1, _with_zero(stage=1)),
    ("zero_optimization.stage 2", lambda c: c.zero_optimization.stage < 2, _with_zero(stage=2)),
    ("zero_optimization.stage 3", lambda c: c.zero_optimization.stage < 3, _with_zero(stage=3)),
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
    """Changes after which the device has room, with their estimates: those that cost the least time come first."""
    found = []
    questions = [("", question)]
    if question.batch and not question.checkpointing:
        questions.append(("gradient checkpointing", replace(question, checkpointing=True)))
    if question.batch > 1:
        questions.append(("micro-batch 1 and gradient checkpointing", replace(question, batch=1, checkpointing=True)))
    for extra, asked in questions:
        candidates = [(name, change(config)) for name, applies, change in CHANGES if applies(config)]
        for name, changed in [("", config), *candidates]:
            result = estimate(model, changed, asked)
            if result.total(DEVICE) <= device_memory:
                found.append((" and ".join(filter(None, [name, extra])), result))
                break
    return found


# -- the command


def report(source: str, config_source: str, question: Question, device_memory: int | None, as_json: bool) -> str:
    """The estimate as text or as a JSON object; ValueError for a model or a configuration that cannot be read."""
    model_config = read_config(source)
    config = fill_in(load_config(config_source, allow_auto=True), model_config)
    if question.batch and config.train_micro_batch_size_per_gpu not in (None, question.batch):
        given = config.train_micro_batch_size_per_gpu
        raise UsageError(f"--batch {question.batch}: {config_source} has train_micro_batch_size_per_gpu {given}")
    model = build(model_config, config.compute_dtype)
    found = estimate(model, config, question)
    fits = device_memory is None or found.total(DEVICE) <= device_memory
    better = [] if fits else remedies(model, config, question, device_memory)
    if as_json:
        changes = [{"change": name, "device": result.total(DEVICE)} for name, result in better]
        return json.dumps(
            {"elements": found.elements, "bytes": found.parts, "fits": fits, "remedies": changes}, indent=2
        )
    lines = [f"{source}: {found.elements:,} parameters, {question.world_size} ranks, each of them holds at most:"]
    for place, parts in found.parts.items():
        if parts:
            lines.append(f"  {place:<8}{_size(found.total(place)):>12}")
            lines += [
                f"    {part:<26}{_size(nbytes):>12}" for part, nbytes in sorted(parts.items(), key=lambda p: -p[1])
            ]
    if not question.batch:
        lines.append("Activations are not included: give --batch and --seq.")
    if not fits:
        largest = max(found.parts[DEVICE], key=found.parts[DEVICE].get)
        lines.append(f"This does not fit on a device of {_size(device_memory)}; the largest part: {largest}.")
        lines += [f"  fits with {name}: {_size(result.total(DEVICE))}" for name, result in better]
        if not better:
            lines.append("  no change of stage, offload or checkpointing is enough: take fewer tokens, or more ranks")
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"
