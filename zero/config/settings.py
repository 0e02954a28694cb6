"""The sections of ``ds_config.json`` as typed, validated settings: one declaration for each key.

See :mod:`zero.config.keys` for the ways to declare a key. Defaults are those of DeepSpeed 0.19.8.
Sizes are numbers of parameter elements, not bytes. The first lines of a section's docstring
introduce it in ``docs/configuration.md``."""

import math
from typing import Annotated

import torch
from pydantic import Field, PrivateAttr, model_validator

from zero.config.keys import (
    BATCH_KEYS,
    NOT_YET,
    CompileConfig,
    Count,
    DType,
    Flag,
    NonNegative,
    Origin,
    Positive,
    Section,
    SectionsWithoutEffect,
    acts,
    choice,
    idle,
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
from zero.config.offload import AioConfig
from zero.config.optim import OptimizerConfig, SchedulerConfig
from zero.config.parallel import ExpertParallelConfig, TensorParallelConfig
from zero.config.precision import BF16Config, DataTypesConfig, FP16Config
from zero.config.sharding import ZeroConfig
from zero.errors import UsageError

_NO_MODEL_PARALLEL = (
    "acts on model-parallel ranks, of which there are none: every rank's activations are its own"
)


class ActivationCheckpointingConfig(Section):
    """What happens to activations between forward and backward."""

    cpu_checkpointing: bool = acts(
        False,
        "On a GPU, keep activations in host memory, each one once. Use gradient checkpointing too.",
    )
    partition_activations: bool = unused(False, _NO_MODEL_PARALLEL)
    number_checkpoints: Count | None = unused(
        None, "only sizes the buffers of contiguous_memory_optimization"
    )
    contiguous_memory_optimization: bool = unused(
        False, "torch's caching allocator reuses the blocks of activations"
    )
    synchronize_checkpoint_boundary: bool = unused(
        False, "transfers are in order with the computation"
    )
    profile: bool = unused(False, "not measured here; use torch.profiler")


class CheckpointConfig(Section):
    """How checkpoints are saved."""

    async_save: bool = acts(
        False, "Not a key of DeepSpeed. Training goes on while a checkpoint is written."
    )
    tag_validation: choice("Ignore", "Warn", "Fail") = acts(
        "Warn",
        "What happens if ranks give different tags.",
        says={
            "Ignore": "Ranks may give different tags.",
            "Warn": "Ranks that give different tags get a warning.",
            "Fail": "Ranks that give different tags are an error.",
        },
    )
    load_universal: bool | None = unused(None, "every checkpoint loads on any number of ranks")
    use_node_local_storage: bool | None = unused(None, "all ranks write to one file system")
    parallel_write: idle("pipeline_stage") = unused(None, "all ranks write at the same time")
    checkpoint_serialization: bool | None = unused(None, NOT_YET)
    writer: idle(
        "type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel decoupled"
    ) = unused(None, NOT_YET)


class Config(SectionsWithoutEffect):
    """Made by :func:`zero.config.load_config`, which also checks keys against each other."""

    train_batch_size: Positive | None = acts(
        None,
        auto="ranks x per_device_train_batch_size x gradient_accumulation_steps",
        says={"other": "A step takes {} samples."},
    )
    """Samples of a step: micro-batch x accumulation x processes / `sequence_parallel_size`. What is missing follows."""
    train_micro_batch_size_per_gpu: Positive | None = acts(
        None,
        auto="per_device_train_batch_size",
        says={"other": "Samples of one forward on one process: {}."},
    )
    """Samples of one forward on one process (the micro-batch)."""
    gradient_accumulation_steps: Positive | None = acts(
        None,
        auto="gradient_accumulation_steps",
        says={1: "Each micro-batch is a step.", "other": "{} micro-batches are one step."},
    )
    """Micro-batches of one step."""
    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig)
    expert_parallel: ExpertParallelConfig = Field(default_factory=ExpertParallelConfig)
    sequence_parallel_size: Positive = acts(
        1,
        says={
            1: "Each process has sequences of its own.",
            "other": "{} neighbouring processes share each sequence (Ulysses).",
        },
    )
    """Neighbouring processes that share each sequence (Ulysses). The Trainer's `ParallelismConfig` sets it."""
    managed_gradient_accumulation: bool = acts(
        True,
        says={
            True: "The engine counts micro-batches: `step()` acts in the last one of a step.",
            False: "Your own call of `step()` ends the accumulation, however many backwards came "
            "before.",
        },
    )
    """false: your own call of `step()` ends the accumulation, however many backwards came before."""
    gradient_clipping: NonNegative = acts(
        1.0,
        auto="max_grad_norm",
        says={
            0: "Gradients are not clipped.",
            "other": "Gradients are scaled down if their global L2 norm is above {}.",
        },
    )
    """Largest global L2 norm of the gradients. 0: no clipping."""
    log_level: choice("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL") | None = acts(
        None, "Of the logger `zero`."
    )
    steps_per_print: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = acts(
        None,
        says={
            "other": "Rank 0 prints a line of numbers every {} steps. The Trainer switches this "
            "off."
        },
    )
    """Rank 0 prints a line of numbers every so many steps. Default: never."""
    wall_clock_breakdown: bool = acts(
        False, "Rank 0 prints each step's seconds of forward, backward, step and waits."
    )
    memory_breakdown: bool = acts(
        False, "Rank 0 prints after each step what the engine holds, by place and kind."
    )
    watchdog_timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Not a key of DeepSpeed. Seconds of waiting after which ranks that block each other are named and the job ends.
    Default: 0.8 of the process group's timeout."""
    communication_data_type: DType = None
    """Dtype in which gradients travel between ranks. gloo's messages are then added in fp32; NCCL adds in this dtype.
    Default: that of the parameters, and `grad_accum_dtype` for sums of several micro-batches, at stages 0 and 1."""
    gradient_allreduce_op: choice("mean", "sum") = acts(
        "mean",
        "Mean or sum of the gradients over the processes.",
        says={"other": "The gradients of a step are the {} of those of the processes."},
    )
    zero_allow_untested_optimizer: Flag = acts(
        True,
        says={
            True: "An optimizer object of any class is accepted.",
            False: "An optimizer object that is neither torch's nor DeepSpeed's is refused.",
        },
    )
    """false: an optimizer object that is neither torch's nor DeepSpeed's is refused. DeepSpeed's default is false."""
    zero_force_ds_cpu_optimizer: bool = True
    """If the file sets true: an offloaded optimizer object must be a `DeepSpeedCPUAdam` or the like."""
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: FP16Config = Field(default_factory=FP16Config)
    bf16: BF16Config = Field(default_factory=BF16Config)
    aio: AioConfig = Field(default_factory=AioConfig)
    activation_checkpointing: ActivationCheckpointingConfig = Field(
        default_factory=ActivationCheckpointingConfig
    )
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
        """At stage 0 DeepSpeed halves the loss scale at every overflow.

        Here a hysteresis that is given holds.
        """
        if self.zero_optimization.stage == 0 and "hysteresis" not in self.fp16.model_fields_set:
            vars(self.fp16)["hysteresis"] = 1
        return self

    def why_idle(self, key: str) -> str | None:
        zero = self.zero_optimization
        if key == "aio" and not any(
            o and o.device == "nvme" for o in (zero.offload_param, zero.offload_optimizer)
        ):
            return "nothing is offloaded to nvme"
        return super().why_idle(key)

    raw = property(lambda self: self._origin.raw)
    auto = property(lambda self: self._origin.auto)
    ignored = property(lambda self: self._origin.ignored)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the gathered parameters: float16, bfloat16 or float32."""
        return (
            torch.float16
            if self.fp16.enabled
            else torch.bfloat16
            if self.bf16.enabled
            else torch.float32
        )

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype in which gradients are summed over micro-batches and kept for the step."""
        return self.data_types.grad_accum_dtype or (
            torch.bfloat16 if self.bf16.without_masters else torch.float32
        )

    @property
    def narrows_gradients(self) -> bool:
        """Whether 16-bit gradients that are not summed over micro-batches are kept in 16 bits.

        This loses nothing where the sum over ranks has 16 bits too.
        """
        return (
            self.data_types.grad_accum_dtype is None
            and not self.zero_optimization.zero_quantized_gradients
        )

    def gradient_bytes(self, sums_have_16_bits: bool) -> int:
        """Bytes of an element of the gradients that are kept for the step.

        Without accumulation steps: those of 1.
        """
        narrow = (
            self.narrows_gradients
            and sums_have_16_bits
            and (self.gradient_accumulation_steps or 1) == 1
        )
        sent = self.communication_data_type or self.compute_dtype
        return min(sent.itemsize, self.sum_dtype.itemsize) if narrow else self.sum_dtype.itemsize

    def deprecated(self) -> list[tuple[str, str]]:
        return self._origin.renamed

    def resolve_batch(self, world_size: int) -> "Config":
        """Complete the three batch sizes in place, by DeepSpeed's rule, and return the
        configuration itself.

        Ranks that share their sequences count as one. Accumulation that neither is given nor
        follows is 1. Raises ValueError if the numbers do not multiply out, or if neither
        train_batch_size nor train_micro_batch_size_per_gpu is known."""
        place, sharing = self._origin.place, self.sequence_parallel_size
        if world_size % sharing:
            message = f"{sharing} does not divide the number of ranks, {world_size}"
            raise UsageError(f"{place}: sequence_parallel_size: {message}")
        world_size //= sharing
        if self.data_parallel_size not in (None, world_size):
            of = f"of groups of {sharing} ranks" if sharing > 1 else "of ranks"
            message = (
                f"is {self.data_parallel_size}, and the number {of} is {world_size}; delete it"
            )
            raise UsageError(f"{place}: data_parallel_size: {message}")
        train, micro, steps = (getattr(self, key) for key in BATCH_KEYS)
        if train is None and micro is None:
            state = (
                "is still 'auto'" if {BATCH_KEYS[0], BATCH_KEYS[1]} & self.auto else "is missing"
            )
            message = (
                f"{state}, and train_batch_size is not given either; set one of them to a number"
            )
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
        size = (
            "world size"
            if self.sequence_parallel_size == 1
            else "world size / sequence_parallel_size"
        )
        ranks = [] if world_size is None else [f"{size} {world_size}"]
        factors = " x ".join([*(f"{key} {value}" for key, value in given.items()), *ranks])
        if world_size is None or len(given) < 2:
            return f"{self.train_batch_size} is not a whole multiple of {factors}"
        product = math.prod(given.values()) * world_size
        return (
            f"{self.train_batch_size} is not {factors} = {product}; change one of them or "
            "leave "
            "one out"
        )
