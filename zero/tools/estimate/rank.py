"""What a training will take on each rank, memory and traffic, before anything is started: for `zero
estimate`.

The model is built of fake tensors, which have shapes and take no memory. What a rank holds is
computed from the groups, as the engine makes them, and from the rules of each stage
(`zero/tools/estimate/states.py`). What it holds only for a part of a step, such as activations and
gathered parameters, is followed through one step with fake tensors (`zero/tools/estimate/step.py`).
What it moves: `zero/tools/estimate/traffic.py`.

Not included: torch itself, buffers of NCCL, fragmentation. An attention mask is counted, also where
a kernel would need none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
)
from transformers.initialization import no_init_weights

from zero.config import Config
from zero.errors import UsageError
from zero.tools.estimate.activation_trace import FAKE, trace
from zero.tools.estimate.buffers import Staging, make_staging, of_requests, of_updates
from zero.tools.estimate.gradients import SUMS
from zero.tools.estimate.messages import of_reduction
from zero.tools.estimate.question import Question, model_folder
from zero.tools.estimate.states import (
    DEVICE,
    DISK,
    HOST,
    Kept,
    keep,
    param_groups,
    updates_whole_tensors,
)
from zero.tools.estimate.step import CODES, TILES, WHOLE, StepMemory, imagined
from zero.tools.estimate.traffic import Traffic, Work, traffic
from zero.tools.estimate.updates import of_tiles, of_whole_tensors

# Parts of host memory: buffers for transfers.
PINNED, PAGEABLE = "buffers, pinned", "buffers, pageable"


@dataclass
class Estimate:
    """Bytes of one rank by place ("device", "host", "disk") and by part; `elements` counts the
    model's parameters.

    activations: at their most, which need not be the fullest moment. traffic: what the rank moves
    in an optimizer step."""

    elements: int
    activations: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    parts: dict[str, dict[str, int]] = field(
        default_factory=lambda: {DEVICE: {}, HOST: {}, DISK: {}}
    )

    def add(self, place: str, part: str, nbytes: float) -> None:
        if nbytes:
            self.parts[place][part] = self.parts[place].get(part, 0) + math.ceil(nbytes)

    def total(self, place: str) -> int:
        return sum(self.parts[place].values())


def read_config(source: str) -> transformers.PretrainedConfig:
    """The configuration of a model's folder, or of a file `config.json`.

    ValueError where there is none.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(
            model_folder(source), trust_remote_code=False
        )
    except Exception as error:  # of any kind: the file is somebody else's
        raise UsageError(f"{source}: {' '.join(str(error).split())}") from error
    class_of(config)
    return config


def class_of(
    config: transformers.PretrainedConfig,
) -> tuple[type[transformers.PreTrainedModel], bool]:
    """The model's class, and whether `architectures` names it. Else it is the language model of
    this model_type.

    If there is none, it is the base model. Raises UsageError for a type of which transformers has
    no model."""
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind, True
    head = (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        if config.is_encoder_decoder
        else MODEL_FOR_CAUSAL_LM_MAPPING
    )
    for mapping in (head, MODEL_MAPPING):
        if type(config) in mapping:
            kind = mapping[type(config)]
            return (kind[0] if isinstance(kind, tuple) else kind), False
    raise UsageError(
        f"config.json: model_type {config.model_type} has no model in transformers: name one in "
        "architectures"
    )


def build(config: transformers.PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model, of fake tensors of this dtype.

    UsageError for one whose constructor asks for values.
    """
    kind, _ = class_of(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # Some models are initialized from values that fake tensors do not have. `init_weights` ties
        # parameters, too.
        with FAKE, no_init_weights():
            model = kind(config)
        model.tie_weights()
        return model.train()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(f"{kind.__name__} cannot be built without values: {error}") from error
    finally:
        torch.set_default_dtype(before)


def fill_in(config: Config, model: transformers.PretrainedConfig) -> Config:
    """Replace "auto" by what transformers writes: sizes from the model's hidden size, and bf16."""
    zero, auto = config.zero_optimization, config.origin.auto
    if "zero_optimization.stage" in auto:
        raise UsageError(
            "zero_optimization.stage is 'auto': give the stage as a number to have it estimated"
        )
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
        config = config.model_copy(
            update={"bf16": config.bf16.model_copy(update={"enabled": True})}
        )
    return config


def estimate(model: nn.Module, config: Config, question: Question) -> Estimate:
    """What one rank holds at most, between the first backward and the end of the step, and what it
    moves in a step.

    Raises UsageError for a model whose forward needs other inputs than token ids, if activations
    are asked for."""
    if config.tensor_parallel.autotp_size > 1:
        raise UsageError(
            "tensor_parallel.autotp_size: memory with tensor parallelism is not estimated; set it "
            "to 1"
        )
    zero, item = config.zero_optimization, config.compute_dtype.itemsize
    second = zero.second_shards_over(question.world_size)
    groups = keep(model, config, question.world_size)
    found = Estimate(sum(group.layout.numel for group in groups))
    for group in groups:
        _add_states(found, config, group)
        if second and not group.plan.persistent:
            found.add(DEVICE, "second shards", group.layout.padded // second * item)
    staging = make_staging(groups, item)
    _add_step(found, model, config, question, groups, staging)
    _add_buffers(found, config, groups, staging)
    return found


def _add_buffers(found: Estimate, config: Config, groups: Sequence[Kept], staging: Staging) -> None:
    """Host memory for transfers."""
    found.add(HOST, PINNED, staging.nbytes)
    if any(group.offloaded for group in groups) and not updates_whole_tensors(config):
        rounded, of_files = of_updates(groups, config)
        found.add(HOST, PINNED, rounded)
        found.add(HOST, PAGEABLE, of_files + of_requests(groups, config))


def _add_step(
    found: Estimate,
    model: nn.Module,
    config: Config,
    question: Question,
    groups: Sequence[Kept],
    staging: Staging,
) -> None:
    """What is held in a part of the step only, and what the step moves."""
    zero, item = config.zero_optimization, config.compute_dtype.itemsize
    gathers = zero.stage == 3 and (
        zero.shards_over(question.world_size) > 1 or zero.offloads_params
    )
    if updates_whole_tensors(config):
        states, whole = of_whole_tensors(groups, param_groups(model, config), config, staging)
        in_step = {WHOLE: whole}
        for place, nbytes in states.items():
            found.add(place, "optimizer state", nbytes)
    else:
        in_step = {TILES: of_tiles(groups, config)}
    step = StepMemory(groups, config, question.world_size, gathers, staging)
    computed = saved = 0
    if question.batch and question.length:
        on_host = config.activation_checkpointing.cpu_checkpointing
        moments, computed, saved = trace(
            model, question.batch, question.length, question.checkpointing, on_host
        )
        found.add(HOST, "activations", saved)
        found.activations = max(moment.peak for moment in moments)
        for part, nbytes in step.peak(
            moments, found.parts[DEVICE].pop("gradients", 0), in_step
        ).items():
            found.add(DEVICE, part, nbytes)
    else:
        step.peak(imagined(model, [group.plan for group in groups]), 0, {})
        found.add(DEVICE, "gathered parameters", step.most_gathered * item)
        found.add(DEVICE, CODES, step.most_messages)
        found.add(
            DEVICE,
            "gradients on their way",
            _most_on_their_way(groups, config, question.world_size),
        )
        found.add(DEVICE, *next(iter(in_step.items())))
        if zero.stage < 2 and (config.gradient_accumulation_steps or 1) > 1:
            sums = (
                sum(group.layout.padded for group in groups if group.trainable)
                * config.sum_dtype.itemsize
            )
            found.add(DEVICE, SUMS, sums)
    found.traffic = traffic(
        model, groups, step.gathers, config, question.world_size, Work(computed, saved)
    )


def _most_on_their_way(groups: Sequence[Kept], config: Config, world_size: int) -> float:
    """Bytes of gradients: one group's is being made while others are being reduced."""
    trained, item = [group for group in groups if group.trainable], config.compute_dtype.itemsize
    if not trained:
        return 0
    largest = max(trained, key=lambda group: group.layout.padded)
    most, total = largest.layout.padded, sum(group.layout.padded for group in trained)
    in_flight = (
        max(most, min(config.zero_optimization.reduce_bucket_size, total)) if world_size > 1 else 0
    )
    held = of_reduction(largest, config, world_size, item, adds=False).held / most
    return (most + in_flight) * item + in_flight * held


def _add_states(found: Estimate, config: Config, group: Kept) -> None:
    """Parameters, gradients, masters and moments of one group."""
    zero, item, shard = (
        config.zero_optimization,
        config.compute_dtype.itemsize,
        group.layout.shard_numel,
    )
    whole = group.plan.persistent or zero.stage < 3
    found.add(group.home.weights, "parameters", (group.layout.padded if whole else shard) * item)
    if not group.trainable:
        return

    found.add(group.place(group.gradient), "gradients", group.gradient)
    found.add(group.home.optimizer, "masters", 0 if group.shares_weights else group.master)
    if not updates_whole_tensors(config):
        found.add(group.home.optimizer, "optimizer state", group.state)
