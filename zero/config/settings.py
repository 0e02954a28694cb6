"""The DeepSpeed configuration (``ds_config.json``) as typed, validated settings.

Made by :mod:`zero.config.loading`. Every key is in one of four states: used (the fields below), without effect
(:mod:`zero.config.keys`; :mod:`zero.config.report` lists them), old (renamed, see :meth:`Config.deprecated`), or an
error that names the dotted key, the file it is in and the nearest valid key. An unknown key at the top, or in a section
without effect, is passed over if it is like no other. All errors of a configuration are reported together, one
line each.

Defaults are those of DeepSpeed 0.19.8. Sizes (``*_bucket_size``, ``*_threshold``, ``*_parameters``, ``*_distance``) are
numbers of parameter elements, not bytes.
"""

import math
import sys
from typing import Annotated, Any, ClassVar

import torch
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from zero.config.keys import (
    BATCH_KEYS,
    NOT_YET,
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
    choice,
    idle,
    only,
    unused,
)
from zero.config.optim import OptimizerConfig, SchedulerConfig
from zero.errors import UsageError


def _path(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"{text!r} is no path: it has a NUL character in it")
    return text


class OffloadConfig(Section):
    """Where shards (``offload_param``) or gradients, masters and optimizer state (``offload_optimizer``) live."""

    device: choice("none", "cpu", "nvme") = "none"
    pin_memory: bool = True
    nvme_path: Annotated[str, AfterValidator(_path)] | None = None

    _only_for_files: ClassVar[tuple[str, ...]] = ("nvme_path", "buffer_count")

    def why_idle(self, key: str) -> str | None:
        if self.device == "none" and key != "device":
            return "nothing is offloaded"
        if self.device != "nvme" and key in self._only_for_files:
            return "acts with device nvme only"
        return super().why_idle(key)


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
    ratio: Fraction | choice("auto") = 1.0
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
    """``zero_optimization.leaf_module``: modules to gather as a whole; see ``zero.deepspeed.leaf``."""

    classes: Names = []
    names: Names = []
    name_suffixes: Names = []


_STAGE_1_2 = "of DeepSpeed's own stages 1 and 2; here every stage shards unit by unit"
_UNQUANTIZED = "parameters and gradients are communicated unquantized"
_UNITS = "parameters are gathered unit by unit, one collective each"


def _even(elements: int) -> int:
    if elements % 2:
        # DeepSpeed's words, for what it refuses.
        raise ValueError("allgather_bucket_size must be a multiple of nccl_start_alignment_factor, which is 2")
    return elements


def _floor(value: Any) -> Any:
    # Its published formula is 0.9 times a square.
    return math.floor(value) if isinstance(value, float) and math.isfinite(value) else value


class ZeroConfig(Section):
    """``zero_optimization``. Sizes in elements; the ``stage3_*`` names are kept as DeepSpeed documents them."""

    stage: Annotated[Int, Field(ge=0, le=3)] = 0
    contiguous_gradients: bool = True
    overlap_comm: bool | None = None
    reduce_bucket_size: Positive = int(5e8)
    # 0: all at once.
    sub_group_size: Annotated[Count, AfterValidator(lambda size: size or sys.maxsize)] = int(1e9)
    offload_param: OffloadParamConfig | None = None
    offload_optimizer: OffloadOptimizerConfig | None = None
    stage3_prefetch_bucket_size: Annotated[Count, BeforeValidator(_floor)] = int(5e7)
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
    zenflow: idle(
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"
    ) = unused(None, NOT_YET)

    @model_validator(mode="after")
    def _overlap_by_default_at_stage_3(self) -> "ZeroConfig":
        if self.overlap_comm is None:
            # Not as an attribute, which would count as given.
            vars(self)["overlap_comm"] = self.stage == 3
        return self

    def why_idle(self, key: str) -> str | None:
        if self.stage < 3 and (key.startswith("stage3_") or key in ("offload_param", "leaf_module")):
            return f"acts at stage 3, this is {self.stage}"
        return super().why_idle(key)

    @property
    def offloads_params(self) -> bool:
        """At stage 3 alone: below it every rank computes with parameters that it holds whole."""
        return self.stage == 3 and self.offload_param is not None and self.offload_param.device != "none"

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"


class _SixteenBit(Section):
    enabled: bool = False

    def why_idle(self, key: str) -> str | None:
        return super().why_idle(key) if self.enabled or key == "enabled" else "the section is not enabled"


class FP16Config(_SixteenBit):
    """``fp16``. ``loss_scale`` 0 means dynamic, starting at ``2 ** initial_scale_power``."""

    auto_cast: bool = unused(False, "inputs keep the dtype that the script gives them")
    loss_scale: NonNegative = 0.0
    # The scale is kept in fp32, whose largest power of two this is.
    initial_scale_power: Annotated[Count, Field(le=127)] = 16
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Positive = 1
    fp16_master_weights_and_grads: bool = unused(False, "masters and moments are always fp32")

    def why_idle(self, key: str) -> str | None:
        if self.loss_scale and key not in ("enabled", "loss_scale"):
            return "the scale is fixed by loss_scale"
        return super().why_idle(key)


class BF16Config(_SixteenBit):
    """``bf16``."""

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
    tag_validation: choice("Ignore", "Warn", "Fail") = "Warn"
    load_universal: bool | None = unused(None, "every checkpoint loads on any number of ranks")
    use_node_local_storage: bool | None = unused(None, "all ranks write to one file system")
    parallel_write: idle("pipeline_stage") = unused(None, "all ranks write at the same time")
    checkpoint_serialization: bool | None = unused(None, NOT_YET)
    writer: idle("type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel decoupled") = unused(
        None, NOT_YET
    )


class Config(SectionsWithoutEffect):
    """A whole configuration. Made by :func:`load_config`, which also checks what a single key cannot tell."""

    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    # False: the script's own call of step() ends the accumulation.
    managed_gradient_accumulation: bool = True
    gradient_clipping: NonNegative = 1.0
    steps_per_print: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = unused(
        None, "the Trainer reports progress; see logging_steps"
    )
    wall_clock_breakdown: bool = False
    # This engine's own key, in seconds; None: 0.8 of the process group's timeout.
    watchdog_timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    communication_data_type: DType = None
    gradient_allreduce_op: choice("mean", "sum") = "mean"
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
    _ignored: list = PrivateAttr(default_factory=list)
    _deprecated: list = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _halve_at_once_at_stage_0(self) -> "Config":
        """There DeepSpeed halves the loss scale at every overflow; a hysteresis that is given is honoured here."""
        if self.zero_optimization.stage == 0 and "hysteresis" not in self.fp16.model_fields_set:
            vars(self.fp16)["hysteresis"] = 1
        return self

    def why_idle(self, key: str) -> str | None:
        zero = self.zero_optimization
        if key == "aio" and not any(o and o.device == "nvme" for o in (zero.offload_param, zero.offload_optimizer)):
            return "nothing is offloaded to nvme"
        return super().why_idle(key)

    @property
    def raw(self) -> dict:
        """The user's own dict, the same object where a dict was given, unchanged."""
        return self._raw

    @property
    def auto(self) -> frozenset[str]:
        """Dotted keys that were still "auto"."""
        return self._auto

    @property
    def ignored(self) -> list[str]:
        """Dotted keys that are not DeepSpeed's, nor like one."""
        return self._ignored

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
        if self.data_parallel_size not in (None, world_size):
            message = f"is {self.data_parallel_size}, and the number of ranks is {world_size}; delete it"
            raise UsageError(f"{self._place}: data_parallel_size: {message}")
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
        # Not as attributes, which would count as given.
        vars(self).update(zip(BATCH_KEYS, (train, micro, steps), strict=True))
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
