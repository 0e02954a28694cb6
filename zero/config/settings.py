"""The sections of ``ds_config.json`` as typed, validated settings: one declaration for each key.

See :mod:`zero.config.keys` for the ways to declare a key. Defaults are those of DeepSpeed 0.19.8. Sizes are numbers of
parameter elements, not bytes. The first lines of a section's docstring introduce it in ``docs/configuration.md``.
"""

import math
import sys
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from zero.config.keys import (
    BATCH_KEYS,
    NOT_YET,
    CompileConfig,
    Count,
    DType,
    Flag,
    Int,
    Names,
    NonNegative,
    Origin,
    Positive,
    Section,
    SectionsWithoutEffect,
    acts,
    choice,
    idle,
    integer,
    integral,
    only,
    unused,
)
from zero.config.monitor import (
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    JsonMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
)
from zero.config.offload import AioConfig, OffloadOptimizerConfig, OffloadParamConfig
from zero.config.optim import OptimizerConfig, SchedulerConfig
from zero.config.parallel import ExpertParallelConfig, TensorParallelConfig
from zero.config.precision import BF16Config, DataTypesConfig, FP16Config
from zero.errors import UsageError


class LeafModuleConfig(Section):
    """Modules whose parameters are all gathered together, for models in which ranks may run different submodules."""

    classes: Names = acts([], "Class names of such modules, with or without the module path.")
    names: Names = acts([], "Names of such modules in the model.")
    name_suffixes: Names = acts([], "Ends of such names.")


_STAGE_1_2 = "of DeepSpeed's own stages 1 and 2; here every stage shards unit by unit"
_UNITS = "parameters are gathered unit by unit, one collective each"
_STAGE_3 = "stage 3"


def _even(elements: int) -> int:
    if elements % 2:
        # DeepSpeed's words, for what it refuses.
        raise ValueError("allgather_bucket_size must be a multiple of nccl_start_alignment_factor, which is 2")
    return elements


def _floor(value: Any) -> Any:
    # TRL writes 0.9 times a square.
    return math.floor(value) if isinstance(value, float) and math.isfinite(value) else value


class ZeroConfig(Section):
    """What is sharded, and how it is communicated.

    A *unit* is a block of the model whose parameters are gathered together. Sizes are in elements. Keys that begin with
    `stage3_` keep DeepSpeed's names.
    """

    stage: integer(0, 3) = acts(0, auto="accelerate's zero_stage")
    """0: nothing is sharded. 1: the optimizer state. 2: gradients too. 3: parameters too."""
    contiguous_gradients: bool = True
    """Copy gradients to their unit's flat buffer once 2^26 elements are there. false: when the unit has all of them."""
    overlap_comm: bool | None = None
    """Reduce gradients while backward goes on. false: wait for each reduction at once. Default: true at stage 3."""
    reduce_bucket_size: Positive = acts(int(5e8), auto="the square of the model's hidden size")
    """Most gradient elements in one reduction, and in all reductions in flight. A larger unit goes alone."""
    sub_group_size: Annotated[Count, AfterValidator(lambda size: size or sys.maxsize)] = int(1e9)
    """Elements that the optimizer updates at a time. 0: all at once."""
    elementwise_optimizer: bool | None = None
    """Whether the optimizer updates each element by that element's history alone. true: its state is cut as the weights
    are. false: each tensor is updated as a whole, on the process that owns it. Default: true for classes that are known
    to do so, else false."""
    offload_param: OffloadParamConfig | None = acts(None, needs=_STAGE_3)
    offload_optimizer: OffloadOptimizerConfig | None = None
    stage3_prefetch_bucket_size: Annotated[Count, BeforeValidator(_floor)] = acts(
        int(5e7), needs=_STAGE_3, auto="0.9 x the square of the model's hidden size"
    )
    """Most elements that are gathered ahead of their use. 0: none."""
    stage3_param_persistence_threshold: Count = acts(int(1e5), needs=_STAGE_3, auto="10 x the hidden size")
    """Parameters of at most this many elements stay whole on every process."""
    stage3_model_persistence_threshold: Count = acts(sys.maxsize, needs=_STAGE_3)
    """Most elements that all of these small parameters may have in sum."""
    stage3_max_live_parameters: Count = acts(int(1e9), needs=_STAGE_3)
    """A block stays gathered after its use only while no more elements than this are gathered in all."""
    stage3_max_reuse_distance: Count = acts(int(1e9), needs=_STAGE_3)
    """Keep a gathered unit if fewer elements are used before it is needed again. 0: free each unit after its use."""
    stage3_gather_16bit_weights_on_model_save: bool = acts(
        False, needs=_STAGE_3, auto="accelerate's zero3_save_16bit_model"
    )
    """`save_model` writes a whole checkpoint that `from_pretrained` loads."""
    leaf_module: LeafModuleConfig | None = acts(None, needs=_STAGE_3)
    mics_shard_size: integer(-1) = -1
    """Hybrid sharding (MiCS): cut what the stage shards over this many consecutive processes, as those of one machine.
    Gradients are then averaged over these groups, which hold the same shards. -1 or 0: over all processes."""
    zero_hpz_partition_size: Count = acts(1, needs=_STAGE_3)
    """A second shard of the 16-bit weights (ZeRO++ hpZ), cut over this many consecutive processes: after the first
    all-gather of a step, all others stay within them. 0, 1 or all processes: none."""
    ignore_unused_parameters: bool = acts(True, "false: a parameter without a gradient is an error.")
    zero_quantized_weights: bool = acts(False, needs=_STAGE_3)
    """Parameters are gathered as 8-bit integers with a scale for each block of 256. Masters, and what is saved, stay
    exact. See `docs/compression.md`."""
    zero_quantized_nontrainable_weights: bool = acts(False, needs=_STAGE_3)
    """The same for frozen parameters alone. Unlike in DeepSpeed, the shards keep their dtype."""
    zero_quantized_gradients: bool = False
    """Gradients travel as integers with a scale for each block of 256, and are summed in fp32."""
    zero_quantized_gradient_bits: Annotated[Literal[4, 8], BeforeValidator(integral)] = acts(8)
    """Not a key of DeepSpeed, which always sends 4. Bits of these integers: 8 or 4."""
    zero_quantized_moments: bool = False
    """Not a key of DeepSpeed. Adam's and AdamW's moments are 8-bit codes with an fp32 scale for each block of 256: 2.03
    bytes per parameter instead of 8. See `docs/optimizers.md`."""
    enable_sanity_checks: bool = False
    """Changing parameters inside `GatheredParameters(modifier_rank=None)` is an error: the change would be lost."""

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
    mics_hierarchical_params_gather: bool = unused(False, "all-gathers of MiCS stay within the shard group anyway")
    memory_efficient_linear: bool = unused(True, "torch.nn.functional.linear is left as it is")
    pipeline_loading_checkpoint: bool = unused(False, NOT_YET)
    override_module_apply: bool = unused(True, "Module.apply is left as it is")
    log_trace_cache_warnings: bool = unused(False, "the schedule is traced again without a warning")
    save_muon_momentum_buffer_in_memory: bool = unused(False, "Muon's momentum lives where offload_optimizer says")
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
        if self.stage < 3 and self.about(key).get("needs") == _STAGE_3:
            return f"acts at stage 3, this is {self.stage}"
        if key == "zero_quantized_gradient_bits" and not self.zero_quantized_gradients:
            return "zero_quantized_gradients is not set"
        return super().why_idle(key)

    def shards_over(self, world_size: int) -> int:
        """The number of ranks over which a unit is cut.

        Raises UsageError if the world cannot be divided into the groups of `mics_shard_size` or of hpZ.
        """
        found = {key: getattr(self, key) for key in ("mics_shard_size", "zero_hpz_partition_size")}
        for key, size in found.items():
            if size > 1 and world_size % size:
                message = f"is {size}, which does not divide the number of processes, {world_size}"
                raise UsageError(f"zero_optimization.{key} {message}")
        mics, second = found.values()
        if mics > 0 and second > 1 and self.stage == 3:
            raise UsageError(
                f"zero_optimization: mics_shard_size (or a mesh) {mics} and zero_hpz_partition_size {second} are two "
                "ways to keep all-gathers within a group: give one of them"
            )
        return mics if mics > 0 else world_size

    def second_shards_over(self, world_size: int) -> int:
        """The number of ranks over which hpZ cuts a unit's second shard; 0 if there is none.

        Below stage 3 every rank holds all parameters on its device, and in a single group the first shard serves.
        """
        size = self.zero_hpz_partition_size
        return size if self.stage == 3 and 1 < size < world_size else 0

    def use_shard_size(self, size: int) -> None:
        """Take `mics_shard_size` from a mesh. Raises UsageError if the configuration says otherwise."""
        if self.mics_shard_size not in (-1, 0, size):
            raise UsageError(
                f"zero_optimization.mics_shard_size is {self.mics_shard_size}, and the mesh's dimension shard has "
                f"{size} ranks; delete the key"
            )
        self.mics_shard_size = size  # counts as given: the table at the start shows it

    @property
    def offloads_params(self) -> bool:
        """Only at stage 3: below it, every rank holds all parameters on its device."""
        return self.stage == 3 and self.offload_param is not None and self.offload_param.device != "none"

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"


_NO_MODEL_PARALLEL = "acts on model-parallel ranks, of which there are none: every rank's activations are its own"


class ActivationCheckpointingConfig(Section):
    """What happens to activations between forward and backward."""

    cpu_checkpointing: bool = acts(
        False, "On a GPU, keep activations in host memory, each one once. Use gradient checkpointing too."
    )
    partition_activations: bool = unused(False, _NO_MODEL_PARALLEL)
    number_checkpoints: Count | None = unused(None, "only sizes the buffers of contiguous_memory_optimization")
    contiguous_memory_optimization: bool = unused(False, "torch's caching allocator reuses the blocks of activations")
    synchronize_checkpoint_boundary: bool = unused(False, "transfers are in order with the computation")
    profile: bool = unused(False, "not measured here; use torch.profiler")


class CheckpointConfig(Section):
    """How checkpoints are saved."""

    async_save: bool = acts(False, "Not a key of DeepSpeed. Training goes on while a checkpoint is written.")
    tag_validation: choice("Ignore", "Warn", "Fail") = acts("Warn", "What happens if ranks give different tags.")
    load_universal: bool | None = unused(None, "every checkpoint loads on any number of ranks")
    use_node_local_storage: bool | None = unused(None, "all ranks write to one file system")
    parallel_write: idle("pipeline_stage") = unused(None, "all ranks write at the same time")
    checkpoint_serialization: bool | None = unused(None, NOT_YET)
    writer: idle("type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel decoupled") = unused(
        None, NOT_YET
    )


class Config(SectionsWithoutEffect):
    """Made by :func:`zero.config.load_config`, which also checks keys against each other."""

    train_batch_size: Positive | None = acts(
        None, auto="per_device_train_batch_size x gradient_accumulation_steps x ranks"
    )
    """Samples of a step: micro-batch x accumulation x processes / `sequence_parallel_size`. What is missing follows."""
    train_micro_batch_size_per_gpu: Positive | None = acts(None, auto="per_device_train_batch_size")
    """Samples of one forward on one process (the micro-batch)."""
    gradient_accumulation_steps: Positive | None = acts(None, auto="gradient_accumulation_steps")
    """Micro-batches of one step."""
    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig)
    expert_parallel: ExpertParallelConfig = Field(default_factory=ExpertParallelConfig)
    sequence_parallel_size: Positive = 1
    """Neighbouring processes that share each sequence (Ulysses). The Trainer's `ParallelismConfig` sets it."""
    managed_gradient_accumulation: bool = True
    """false: your own call of `step()` ends the accumulation, however many backwards came before."""
    gradient_clipping: NonNegative = acts(1.0, auto="max_grad_norm")
    """Largest global L2 norm of the gradients. 0: no clipping."""
    log_level: choice("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL") | None = acts(None, "Of the logger `zero`.")
    steps_per_print: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = None
    """Rank 0 prints a line of numbers every so many steps. Default: never."""
    wall_clock_breakdown: bool = acts(False, "Rank 0 prints each step's seconds of forward, backward, step and waits.")
    memory_breakdown: bool = acts(False, "Rank 0 prints after each step what the engine holds, by place and kind.")
    watchdog_timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Not a key of DeepSpeed. Seconds of waiting after which ranks that block each other are named and the job ends.
    Default: 0.8 of the process group's timeout."""
    communication_data_type: DType = None
    """Dtype in which gradients travel between ranks. gloo's messages are then added in fp32; NCCL adds in this dtype.
    Default: that of the parameters."""
    gradient_allreduce_op: choice("mean", "sum") = acts("mean", "Mean or sum of the gradients over the processes.")
    zero_allow_untested_optimizer: Flag = True
    """false: an optimizer object that is neither torch's nor DeepSpeed's is refused. DeepSpeed's default is false."""
    zero_force_ds_cpu_optimizer: bool = True
    """If the file sets true: an offloaded optimizer object must be a `DeepSpeedCPUAdam` or the like."""
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: FP16Config = Field(default_factory=FP16Config)
    bf16: BF16Config = Field(default_factory=BF16Config)
    aio: AioConfig = Field(default_factory=AioConfig)
    activation_checkpointing: ActivationCheckpointingConfig = Field(default_factory=ActivationCheckpointingConfig)
    compile: CompileConfig = Field(default_factory=CompileConfig)
    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig)
    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    json_monitor: JsonMonitorConfig = Field(default_factory=JsonMonitorConfig)
    csv_monitor: CsvMonitorConfig = Field(default_factory=CsvMonitorConfig)
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig)
    flops_profiler: FlopsProfilerConfig = Field(default_factory=FlopsProfilerConfig)

    _origin: Origin = PrivateAttr(Origin())

    @model_validator(mode="after")
    def _halve_at_once_at_stage_0(self) -> "Config":
        """At stage 0 DeepSpeed halves the loss scale at every overflow. Here a hysteresis that is given holds."""
        if self.zero_optimization.stage == 0 and "hysteresis" not in self.fp16.model_fields_set:
            vars(self.fp16)["hysteresis"] = 1
        return self

    def why_idle(self, key: str) -> str | None:
        zero = self.zero_optimization
        if key == "aio" and not any(o and o.device == "nvme" for o in (zero.offload_param, zero.offload_optimizer)):
            return "nothing is offloaded to nvme"
        return super().why_idle(key)

    raw = property(lambda self: self._origin.raw)
    auto = property(lambda self: self._origin.auto)
    ignored = property(lambda self: self._origin.ignored)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the gathered parameters: float16, bfloat16 or float32."""
        return torch.float16 if self.fp16.enabled else torch.bfloat16 if self.bf16.enabled else torch.float32

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype in which gradients are summed over micro-batches and kept for the step."""
        return self.data_types.grad_accum_dtype or (torch.bfloat16 if self.bf16.without_masters else torch.float32)

    @property
    def narrows_gradients(self) -> bool:
        """Whether 16-bit gradients that are not summed over micro-batches are kept in 16 bits.

        This loses nothing where the sum over ranks has 16 bits too.
        """
        return self.data_types.grad_accum_dtype is None and not self.zero_optimization.zero_quantized_gradients

    def gradient_bytes(self, sums_have_16_bits: bool) -> int:
        """Bytes of an element of the gradients that are kept for the step. Without accumulation steps: those of 1."""
        narrow = self.narrows_gradients and sums_have_16_bits and (self.gradient_accumulation_steps or 1) == 1
        sent = self.communication_data_type or self.compute_dtype
        return min(sent.itemsize, self.sum_dtype.itemsize) if narrow else self.sum_dtype.itemsize

    def deprecated(self) -> list[tuple[str, str]]:
        return self._origin.renamed

    def resolve_batch(self, world_size: int) -> "Config":
        """Complete the three batch sizes in place, by DeepSpeed's rule, and return the configuration itself.

        Ranks that share their sequences count as one. Accumulation that neither is given nor follows is 1. Raises
        ValueError if the numbers do not multiply out, or if neither train_batch_size nor train_micro_batch_size_per_gpu
        is known.
        """
        place, sharing = self._origin.place, self.sequence_parallel_size
        if world_size % sharing:
            message = f"{sharing} does not divide the number of ranks, {world_size}"
            raise UsageError(f"{place}: sequence_parallel_size: {message}")
        world_size //= sharing
        if self.data_parallel_size not in (None, world_size):
            of = f"of groups of {sharing} ranks" if sharing > 1 else "of ranks"
            message = f"is {self.data_parallel_size}, and the number {of} is {world_size}; delete it"
            raise UsageError(f"{place}: data_parallel_size: {message}")
        train, micro, steps = (getattr(self, key) for key in BATCH_KEYS)
        if train is None and micro is None:
            state = "is still 'auto'" if {BATCH_KEYS[0], BATCH_KEYS[1]} & self.auto else "is missing"
            message = f"{state}, and train_batch_size is not given either; set one of them to a number"
            raise UsageError(f"{place}: train_micro_batch_size_per_gpu: {message}")
        steps = steps or (1 if train is None or micro is None else train // (micro * world_size))
        micro = micro or train // (steps * world_size)
        train = train or micro * steps * world_size
        if train != micro * steps * world_size:
            raise UsageError(f"{place}: train_batch_size: {self._batch_mismatch(world_size)}")
        # Not as attributes, which would count as given.
        vars(self).update(zip(BATCH_KEYS, (train, micro, steps), strict=True))
        return self

    def _batch_mismatch(self, world_size: int | None) -> str:
        given = {key: value for key in BATCH_KEYS[1:] if (value := getattr(self, key)) is not None}
        size = "world size" if self.sequence_parallel_size == 1 else "world size / sequence_parallel_size"
        ranks = [] if world_size is None else [f"{size} {world_size}"]
        factors = " x ".join([*(f"{key} {value}" for key, value in given.items()), *ranks])
        if world_size is None or len(given) < 2:
            return f"{self.train_batch_size} is not a whole multiple of {factors}"
        product = math.prod(given.values()) * world_size
        return f"{self.train_batch_size} is not {factors} = {product}; change one of them or leave one out"
