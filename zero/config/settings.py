"""The DeepSpeed configuration (``ds_config.json``) as typed, validated settings.

:func:`load_config` is the way in. Every key is in one of four states: used (the fields below), without effect
(:mod:`zero.config.keys`; :mod:`zero.config.report` lists them), old (renamed, see :meth:`Config.deprecated`), or an
error that names the dotted key, the file it is in and the nearest valid key; sections without effect are not looked
into. All errors of a configuration are reported together, one line each.

Defaults are those of DeepSpeed 0.19.8. Sizes (``*_bucket_size``, ``*_threshold``, ``*_parameters``, ``*_distance``) are
numbers of parameter elements, not bytes.
"""

import math
import os
import sys
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from zero.config.keys import (
    AUTO_WITHOUT_DEFAULT,
    BATCH_KEYS,
    NOT_YET,
    REMOVED_KEYS,
    Count,
    DType,
    Flag,
    Fraction,
    Int,
    Names,
    NonNegative,
    Positive,
    Section,
    SectionsWithoutEffect,
    TagValidation,
    only,
    unused,
)
from zero.config.optim import OptimizerConfig, SchedulerConfig
from zero.config.reading import pop, read, rename_deprecated, take_auto, validate
from zero.errors import UsageError


class OffloadConfig(Section):
    """Where shards (``offload_param``) or gradients, masters and optimizer state (``offload_optimizer``) live."""

    device: Literal["none", "cpu", "nvme"] = "none"
    pin_memory: bool = True
    nvme_path: str | None = None

    _only_for_files: ClassVar[tuple[str, ...]] = ("nvme_path", "buffer_count")

    def idle(self, key: str) -> str | None:
        if self.device == "none" and key != "device":
            return "nothing is offloaded"
        if self.device != "nvme" and key in self._only_for_files:
            return "acts with device nvme only"
        return super().idle(key)


class OffloadParamConfig(OffloadConfig):
    """``zero_optimization.offload_param``. Sizes in elements."""

    # Together: how much is read from files ahead of its use.
    buffer_count: Positive = 5
    buffer_size: Positive = int(1e8)
    max_in_cpu: Count = int(1e9)

    _only_for_files: ClassVar[tuple[str, ...]] = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")


class OffloadOptimizerConfig(OffloadConfig):
    """``zero_optimization.offload_optimizer``. ``overlap_step`` is this engine's own; see :mod:`zero.optim.updates`."""

    buffer_count: Positive = unused(4, "as many buffers are made as the tensors of a tile need")
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = unused(False, "new moments are holes in the file: nothing is written for them")
    ratio: Fraction | Literal["auto"] = 1.0
    # None: where the state is in another memory than the one that computes.
    overlap_step: bool | None = None
    super_offload: bool = unused(False, NOT_YET)
    cpuadam_cores_perc: Fraction = unused(0.8, "the cores of the machine are divided among its ranks")

    _only_for_files: ClassVar[tuple[str, ...]] = ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write")

    @property
    def pipeline(self) -> bool:
        return self.pipeline_read or self.pipeline_write


class AioConfig(Section):
    """``aio``: how files are read and written. ``block_size`` in bytes."""

    block_size: Positive = 1 << 20
    queue_depth: Positive = 32
    thread_count: Positive = 4
    intra_op_parallelism: Positive | None = unused(None, "threads are counted by thread_count")
    single_submit: bool = unused(False, "blocks are read and written by threads, one call for each")
    overlap_events: bool = unused(True, "blocks are always read and written while others are waited for")
    use_gds: only(bool, False, "files are read to host memory, without GPUDirect Storage") = False


class LeafModuleConfig(Section):
    """``zero_optimization.leaf_module``: modules to gather as a whole; see ``zero.leaf``."""

    classes: Names = []
    names: Names = []
    name_suffixes: Names = []


_STAGE_1_2 = "acts on stages 1 and 2 only"
_UNQUANTIZED = "parameters and gradients are communicated unquantized"
_UNITS = "parameters are gathered unit by unit, one collective each"


def _even(elements: int) -> int:
    if elements % 2:
        # DeepSpeed's words, for what it refuses.
        raise ValueError("allgather_bucket_size must be a multiple of nccl_start_alignment_factor, which is 2")
    return elements


class ZeroConfig(Section):
    """``zero_optimization``. Sizes in elements; the ``stage3_*`` names are kept as DeepSpeed documents them."""

    stage: Annotated[Int, Field(ge=0, le=3)] = 0
    contiguous_gradients: bool = True
    overlap_comm: bool | None = None
    reduce_bucket_size: Positive = int(5e8)
    sub_group_size: Positive = int(1e9)
    offload_param: OffloadParamConfig | None = None
    offload_optimizer: OffloadOptimizerConfig | None = None
    stage3_prefetch_bucket_size: Count = int(5e7)
    stage3_param_persistence_threshold: Count = int(1e5)
    stage3_model_persistence_threshold: Count = sys.maxsize
    stage3_max_live_parameters: Count = int(1e9)
    stage3_max_reuse_distance: Count = int(1e9)
    stage3_gather_16bit_weights_on_model_save: bool = False
    leaf_module: LeafModuleConfig | None = None
    ignore_unused_parameters: bool = True
    enable_sanity_checks: bool = False

    allgather_bucket_size: Annotated[Count, AfterValidator(_even)] = unused(int(5e8), _STAGE_1_2)
    allgather_partitions: bool = unused(True, _STAGE_1_2)
    reduce_scatter: bool = unused(True, "gradients are always reduce-scattered")
    use_multi_rank_bucket_allreduce: bool = unused(True, _STAGE_1_2)
    compute_grad_norm: only(bool, True, "the gradient norm is always computed") = True
    load_from_fp32_weights: bool = unused(True, "masters are always restored from their fp32 copies")
    elastic_checkpoint: bool = unused(False, "removed from DeepSpeed's ZeRO-3 as well")
    legacy_stage1: bool = unused(False, _STAGE_1_2)
    round_robin_gradients: bool = unused(False, _STAGE_1_2)
    parameter_alignment: bool = unused(False, _STAGE_1_2)
    cpu_offload_use_pin_memory: bool | None = unused(None, "superseded by pin_memory in the offload sections")
    stage3_module_granularity_threshold: Int = unused(0, _UNITS)
    stage3_use_all_reduce_for_fetch_params: bool = unused(False, _UNITS)
    stage3_allgather_sequential: bool = unused(False, _UNITS)
    zero_hpz_partition_size: Count = unused(1, "there is one level of sharding")
    zero_quantized_weights: bool = unused(False, _UNQUANTIZED)
    zero_quantized_nontrainable_weights: bool = unused(False, _UNQUANTIZED)
    zero_quantized_gradients: bool = unused(False, _UNQUANTIZED)
    memory_efficient_linear: bool = unused(True, "torch.nn.functional.linear is left as it is")
    pipeline_loading_checkpoint: bool = unused(False, NOT_YET)
    override_module_apply: bool = unused(True, "Module.apply is left as it is")
    log_trace_cache_warnings: bool = unused(False, "the schedule is traced again without a warning")
    save_muon_momentum_buffer_in_memory: bool = unused(False, "there is no Muon optimizer")
    zenflow: dict | None = unused(None, NOT_YET)

    @model_validator(mode="after")
    def _overlap_by_default_at_stage_3(self) -> "ZeroConfig":
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == 3
        return self

    @property
    def offloads_params(self) -> bool:
        """At stage 3 alone: below it every rank computes with parameters that it holds whole."""
        return self.stage == 3 and self.offload_param is not None and self.offload_param.device != "none"

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"


class FP16Config(Section):
    """``fp16``. ``loss_scale`` 0 means dynamic, starting at ``2 ** initial_scale_power``."""

    enabled: bool = False
    auto_cast: bool = unused(False, "inputs keep the dtype that the script gives them")
    loss_scale: NonNegative = 0.0
    initial_scale_power: Count = 16
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Positive = 1
    fp16_master_weights_and_grads: bool = unused(False, "masters and moments are always fp32")


class BF16Config(Section):
    """``bf16``."""

    enabled: bool = False
    immediate_grad_update: bool = unused(False, "gradients are always reduced as soon as a unit's backward is done")
    # False: a step is taken with gradients that are not finite, too.
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = unused(False, "masters and moments are always fp32")
    bf16_optimizer_states: bool = unused(False, "masters and moments are always fp32")


_NO_MODEL_PARALLEL = "acts on model-parallel ranks, of which there are none: every rank's activations are its own"


class ActivationCheckpointingConfig(Section):
    """``activation_checkpointing``; see :mod:`zero.activations`."""

    cpu_checkpointing: bool = False
    partition_activations: bool = unused(False, _NO_MODEL_PARALLEL)
    number_checkpoints: Count | None = unused(None, "only sizes the buffers of contiguous_memory_optimization")
    contiguous_memory_optimization: bool = unused(False, "torch's caching allocator reuses the blocks of activations")
    synchronize_checkpoint_boundary: bool = unused(False, "transfers are in order with the computation")
    profile: bool = unused(False, "not measured here; use torch.profiler")


class DataTypesConfig(Section):
    """``data_types``. Gradients are summed over micro-batches, and kept for the step, in fp32 if nothing is given."""

    grad_accum_dtype: DType = None
    param_dtype: DType = unused(None, "parameters follow the fp16 and bf16 sections")
    buffer_dtype: DType = unused(None, "buffers keep the dtype they are loaded with")
    keep_in_fp32_modules: list[str] | str = unused("auto", "every parameter has the dtype of the fp16 or bf16 section")


class CheckpointConfig(Section):
    """``checkpoint``. ``async_save`` is this engine's own key: training goes on while a checkpoint is written."""

    async_save: bool = False
    tag_validation: TagValidation = "Warn"
    load_universal: bool | None = unused(None, "every checkpoint loads on any number of ranks")
    use_node_local_storage: bool | None = unused(None, "all ranks write to one file system")
    parallel_write: dict | None = unused(None, "all ranks write at the same time")
    checkpoint_serialization: bool | None = unused(None, NOT_YET)
    writer: dict | None = unused(None, NOT_YET)


class Config(SectionsWithoutEffect):
    """A whole configuration. Made by :func:`load_config`, which also checks what a single key cannot tell."""

    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    # False: the script's own call of step() ends the accumulation.
    managed_gradient_accumulation: bool = True
    gradient_clipping: NonNegative = 1.0
    steps_per_print: Annotated[float, Field(gt=0)] | None = unused(
        None, "the Trainer reports progress; see logging_steps"
    )
    wall_clock_breakdown: bool = False
    # This engine's own key, in seconds; None: 0.8 of the process group's timeout.
    watchdog_timeout: Annotated[float, Field(gt=0)] | None = None
    communication_data_type: DType = None
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    # Not DeepSpeed's default, which is false: here every element-wise optimizer works alike.
    zero_allow_untested_optimizer: Flag = True
    # Given as true, a script's torch optimizer is refused under offload; accelerate makes it a DeepSpeedCPUAdam then.
    zero_force_ds_cpu_optimizer: bool = True
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: FP16Config = Field(default_factory=FP16Config)
    bf16: BF16Config = Field(default_factory=BF16Config)
    aio: AioConfig = Field(default_factory=AioConfig)
    activation_checkpointing: ActivationCheckpointingConfig = Field(default_factory=ActivationCheckpointingConfig)
    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig)
    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)

    _raw: dict = PrivateAttr(default_factory=dict)
    _place: str = PrivateAttr("")
    _auto: frozenset = PrivateAttr(frozenset())
    _deprecated: list = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _halve_at_once_at_stage_0(self) -> "Config":
        """There DeepSpeed halves the loss scale at every overflow; a hysteresis that is given is honoured here."""
        if self.zero_optimization.stage == 0 and "hysteresis" not in self.fp16.model_fields_set:
            vars(self.fp16)["hysteresis"] = 1
        return self

    def idle(self, key: str) -> str | None:
        zero = self.zero_optimization
        if key == "aio" and not any(o and o.device == "nvme" for o in (zero.offload_param, zero.offload_optimizer)):
            return "nothing is offloaded to nvme"
        return super().idle(key)

    @property
    def raw(self) -> dict:
        """The user's own dict, the same object where a dict was given, unchanged."""
        return self._raw

    @property
    def auto(self) -> frozenset[str]:
        """Dotted keys that were still "auto"."""
        return self._auto

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the gathered parameters: float16, bfloat16 or float32."""
        return torch.float16 if self.fp16.enabled else torch.bfloat16 if self.bf16.enabled else torch.float32

    def deprecated(self) -> list[tuple[str, str]]:
        """(old dotted key, new dotted key) of every key that was renamed on reading."""
        return self._deprecated

    def resolve_batch(self, world_size: int) -> "Config":
        """Complete the three batch sizes in place, by DeepSpeed's rule, and return the configuration itself.

        train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size, in samples.
        Accumulation that neither is given nor follows is 1. Raises ValueError if the numbers do not multiply out, or
        if neither train_batch_size nor train_micro_batch_size_per_gpu is known.
        """
        train, micro, steps = (getattr(self, key) for key in BATCH_KEYS)
        if train is None and micro is None:
            state = "is still 'auto'" if {BATCH_KEYS[0], BATCH_KEYS[1]} & self._auto else "is missing"
            raise UsageError(
                f"{self._place}: train_micro_batch_size_per_gpu: {state}, and train_batch_size is not given either; "
                "set one of them to a number"
            )
        if train is None:
            steps = steps or 1
            train = micro * steps * world_size
        elif micro is None:
            steps = steps or 1
            micro = train // (steps * world_size)
        elif steps is None:
            steps = train // (micro * world_size)
        if train != micro * steps * world_size or not micro or not steps:
            raise UsageError(f"{self._place}: train_batch_size: {self._batch_mismatch(world_size)}")
        self.train_batch_size = train
        self.train_micro_batch_size_per_gpu = micro
        self.gradient_accumulation_steps = steps
        return self

    def _batch_mismatch(self, world_size: int | None) -> str:
        given = {key: value for key in BATCH_KEYS[1:] if (value := getattr(self, key)) is not None}
        factors = " x ".join(f"{key} {value}" for key, value in given.items())
        if world_size is None:
            return f"{self.train_batch_size} is not a whole multiple of {factors}"
        factors = " x ".join(filter(None, [factors, f"world size {world_size}"]))
        if len(given) < 2:
            return f"{self.train_batch_size} is not a whole multiple of {factors}"
        product = math.prod(given.values()) * world_size
        return f"{self.train_batch_size} is not {factors} = {product}; change one of them or leave one out"


def load_config(source: str | os.PathLike | dict, *, allow_auto: bool = False) -> Config:
    """Read and check a DeepSpeed configuration.

    Args:
        source: path of a JSON file, a dict (left unchanged), a JSON string, or a JSON string in URL-safe base64.
        allow_auto: accept "auto" where transformers and accelerate fill it in later; the key then has its default
            (batch sizes: None). Without it, "auto" is an error where DeepSpeed has no default to fall back on.

    Raises:
        ValueError: one line for each thing wrong, naming file, dotted key, what was expected and the nearest key.
    """
    place, raw = read(source)
    data, deprecated, problems = rename_deprecated(raw)
    for key, reason in REMOVED_KEYS.items():
        # A section that is switched off asks for nothing.
        if (value := pop(data, key)) is not None and value[0] != {"enabled": False}:
            problems.append((key, reason))
    auto: set[str] = set()
    take_auto(data, "", auto)
    config, found = validate(data, Config)
    problems = {**dict(problems), **found}
    if config is not None:
        config._raw, config._place, config._auto, config._deprecated = raw, place, frozenset(auto), deprecated
        for key, message in _contradictions(config, allow_auto, unknown={*auto, *problems}):
            problems.setdefault(key, message)
    if problems:
        raise UsageError("\n".join(f"{place}: {key}: {message}" for key, message in problems.items()))
    return config


def _contradictions(config: Config, allow_auto: bool, unknown: set[str]) -> Iterator[tuple[str, str]]:
    """(dotted key, message) of settings that are valid alone but not together; ``unknown`` keys have no value yet."""
    if not allow_auto:
        for key in AUTO_WITHOUT_DEFAULT:
            if key in config.auto:
                yield key, "is still 'auto' and has no default; set a value"
    yield from _precision_contradictions(config)
    zero = config.zero_optimization
    if not config.managed_gradient_accumulation and zero.stage < 2 and zero.overlap_comm:
        yield (
            "managed_gradient_accumulation",
            "false supports zero_optimization.overlap_comm only with ZeRO stage 2 or 3; below, gradients are reduced "
            "in step() alone: set overlap_comm to false",
        )
    yield from _offload_contradictions(config.zero_optimization, "zero_optimization.stage" not in unknown)
    if config.optimizer is not None:
        yield from config.optimizer.contradictions()
    if config.scheduler is not None:
        yield from config.scheduler.contradictions(config.auto)
    train, micro, steps = (getattr(config, key) for key in BATCH_KEYS)
    if train is not None and train % ((micro or 1) * (steps or 1)):
        yield "train_batch_size", config._batch_mismatch(None)


def _precision_contradictions(config: Config) -> Iterator[tuple[str, str]]:
    fp16 = config.fp16
    if fp16.enabled and config.bf16.enabled:
        yield "bf16.enabled", "fp16.enabled is true too; choose one of them"
    initial = 2**fp16.initial_scale_power
    if fp16.enabled and not fp16.loss_scale and fp16.min_loss_scale > initial:
        yield "fp16.min_loss_scale", f"{fp16.min_loss_scale} is above 2 ** initial_scale_power = {initial}"


def _offload_contradictions(zero: ZeroConfig, stage_known: bool) -> Iterator[tuple[str, str]]:
    for name, minimum in (("offload_param", 3), ("offload_optimizer", 1)):
        offload = getattr(zero, name)
        if offload is None or offload.device == "none":
            continue
        key = f"zero_optimization.{name}.device"
        if offload.device == "nvme" and not offload.nvme_path:
            yield f"zero_optimization.{name}.nvme_path", "is missing, and device is nvme; name a folder on a fast disk"
        # `offload_param` is left aside below stage 3: accelerate's plugin writes it whatever the stage.
        if stage_known and zero.stage < minimum and name == "offload_optimizer":
            yield key, f"needs zero_optimization.stage of at least {minimum}, got {zero.stage}"
