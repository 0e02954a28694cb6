"""The whole configuration: the keys of the top level, and the sections.

See :mod:`zero.config.keys` for how a key is declared. Defaults are DeepSpeed 0.19.8's. Sizes
are numbers of parameter elements, not bytes. The first lines of a section's docstring introduce it
in ``docs/configuration.md``."""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator

from zero.config.idle import with_idle_keys
from zero.config.keys import AnyCase, DType, Flag, NonNegative, Positive, Section, key
from zero.config.monitor import (
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    JsonMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
)
from zero.config.offload import AioConfig, Folder
from zero.config.optim import OptimizerConfig, SchedulerConfig
from zero.config.parallel import ExpertParallelConfig, TensorParallelConfig
from zero.config.precision import BF16Config, DataTypesConfig, FP16Config
from zero.config.sharding import ZeroConfig
from zero.errors import UsageError, require_divisor

if TYPE_CHECKING:
    import torch


@with_idle_keys("activation_checkpointing")
class ActivationCheckpointingConfig(Section):
    """Where activations are kept between the forward and the backward pass.

    Attributes:
        cpu_checkpointing: Keep activations in host memory until backward needs them. Use gradient
            checkpointing too, so that few are copied.
        nvme_path: Keep activations of at least 1 MiB in a file in this folder on a fast disk. It
            may differ between machines. Not in DeepSpeed.
        batch_slices: Run each block's batch in slices, keep only their inputs, and recompute the
            rest in backward; compute logits in chunks of tokens. This replaces gradient
            checkpointing: see `docs/offload.md`. Not in DeepSpeed.
            - auto: A batch runs in slices of at most 8,192 tokens.
            - N: A batch runs in N slices.
        trust_slices: Let blocks that are not transformers' own run in slices, too.
            `docs/offload.md` says what they must not do. Not in DeepSpeed.
            - true: Blocks of any class run in slices.
            - false: A block that is not known to give the same results in slices is an error.
    """

    cpu_checkpointing: bool = False
    nvme_path: Folder | None = None
    batch_slices: Positive | Annotated[Literal["auto"], AnyCase()] | None = None
    trust_slices: bool = key(False, needs="batch_slices")


@with_idle_keys("checkpoint")
class CheckpointConfig(Section):
    """How checkpoints are saved.

    Attributes:
        async_save: Continue training while a checkpoint is written. Not in DeepSpeed.
        tag_validation: What happens if ranks pass different tags to `save_checkpoint`.
            - Ignore: Ranks may save under different tags.
            - Warn: A warning is printed if ranks save under different tags.
            - Fail: It is an error if ranks save under different tags.
    """

    async_save: bool = False
    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], AnyCase()] = "Warn"


@with_idle_keys("compile")
class CompileConfig(Section):
    """Compile each block with `torch.compile`, at every stage.

    `engine.compile()` and `--torch_compile` do the same.

    Attributes:
        enabled: Compile the blocks. DeepSpeed had this key up to 0.14.
        backend: Backend of `torch.compile`.
        kwargs: Further arguments of `torch.compile`, such as `dynamic`.
    """

    enabled: bool = False
    backend: str = key("inductor", needs="enabled")
    kwargs: dict[str, Any] = key({}, needs="enabled")


@dataclass
class Origin:
    """Where a configuration came from.

    Attributes:
        place: its name in messages.
        raw: the user's own dict, unchanged.
        written: the same, with every key in its section and under its new name.
        given: dotted keys that the user has given a value.
        auto: dotted keys that were still "auto".
        ignored: dotted keys that resemble no known one.
        renamed: pairs of an old name and the new one.
    """

    place: str = ""
    raw: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    auto: set[str] = field(default_factory=set)
    ignored: list[str] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)


@with_idle_keys("")
class Config(Section):
    """Made by :func:`zero.config.load_config`, which also checks keys against each other.

    Attributes:
        train_batch_size: Global batch: samples in one optimizer step, over all processes.
            - N: A step takes N samples.
        train_micro_batch_size_per_gpu: Micro-batch: samples in one forward pass on one process.
            - N: The micro-batch of one forward pass on one process has N samples.
        gradient_accumulation_steps: Micro-batches in one optimizer step.
            - 1: Each micro-batch is a step.
            - N: N micro-batches make one step.
        data_parallel_size: Computed. If given, it must equal the number of processes with their own
            batches.
        sequence_parallel_size: Neighbouring processes that share each sequence (Ulysses). The
            Trainer's `ParallelismConfig` sets it.
            - 1: Each process has its own sequences.
            - N: N neighbouring processes share each sequence (Ulysses).
        managed_gradient_accumulation: Update the parameters only in the `step()` after the last
            micro-batch. `false`: in each `step()`.
            - true: The engine counts micro-batches: `step()` updates the parameters after the last
              one of a step.
            - false: Each call of `step()` updates the parameters, however many backward passes came
              before.
        gradient_clipping: The largest global L2 norm, to which larger gradients are scaled down. 0:
            no clipping.
            - 0: Gradients are not clipped.
            - N: Gradients are scaled down if their global L2 norm exceeds N.
        on_out_of_memory: `explain`: the error says what filled the memory and what to change.
            `adapt`: repeat the step with less memory, see `docs/troubleshooting.md`. Not in
            DeepSpeed.
            - explain: The error says what filled the memory and what to change.
            - adapt: The step is repeated with less memory: see `docs/troubleshooting.md`.
        log_level: The level of the logger `zero`.
        steps_per_print: Steps from one line of metrics on rank 0 to the next. Default: none.
            - N: Rank 0 prints a line of metrics every N steps. The Trainer switches this off.
        wall_clock_breakdown: After each step, print the seconds of forward, backward and step on
            rank 0, and how much of that was waiting.
        memory_breakdown: Print the engine's memory on rank 0 after each step, by place and kind.
        watchdog_timeout: Seconds after which ranks that wait for each other end the job, and say
            where each waits. Default: 0.8 x the process group's timeout. Not in DeepSpeed.
        communication_data_type: The dtype in which gradients are sent and summed (gloo always sums
            in fp32). Default: the parameters'; at stages 0 and 1 with accumulation,
            `grad_accum_dtype`.
        gradient_allreduce_op: Average or sum gradients over the processes.
            - N: Gradients are reduced to their N over all processes.
        zero_allow_untested_optimizer: Accept an optimizer object of any class. `false`, DeepSpeed's
            default: only torch's or DeepSpeed's.
            - true: An optimizer object of any class is accepted.
            - false: An optimizer object that is neither torch's nor DeepSpeed's is an error.
        zero_force_ds_cpu_optimizer: With `true` in the file, accelerate replaces an offloaded
            optimizer object by a `DeepSpeedCPUAdam`, and others are an error. `false`: it keeps
            yours.
            - true: An offloaded optimizer object must be a `DeepSpeedCPUAdam` or similar, which
              accelerate substitutes for yours.
            - false: An offloaded optimizer object of any class is accepted, and accelerate keeps
              yours.
    """

    lenient = True

    train_batch_size: Positive | None = key(
        None, auto="ranks x per_device_train_batch_size x gradient_accumulation_steps"
    )
    train_micro_batch_size_per_gpu: Positive | None = key(None, auto="per_device_train_batch_size")
    gradient_accumulation_steps: Positive | None = key(None, auto="gradient_accumulation_steps")
    data_parallel_size: Positive | None = None
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    expert_parallel: ExpertParallelConfig = ExpertParallelConfig()
    sequence_parallel_size: Positive = 1
    managed_gradient_accumulation: bool = True
    gradient_clipping: NonNegative = key(1.0, auto="max_grad_norm")
    on_out_of_memory: Annotated[Literal["explain", "adapt"], AnyCase()] = "explain"
    log_level: (
        Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], AnyCase()] | None
    ) = None
    steps_per_print: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    watchdog_timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    communication_data_type: DType = None
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], AnyCase()] = "mean"
    zero_allow_untested_optimizer: Flag = True
    zero_force_ds_cpu_optimizer: bool = True
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    zero_optimization: ZeroConfig = ZeroConfig()
    fp16: FP16Config = Field(FP16Config(), validate_default=True)
    bf16: BF16Config = BF16Config()
    aio: AioConfig = AioConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    compile: CompileConfig = CompileConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    json_monitor: JsonMonitorConfig = JsonMonitorConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @field_validator("fp16")
    @classmethod
    def _halve_at_once_at_stage_0(cls, fp16: FP16Config, info: ValidationInfo) -> FP16Config:
        """At stage 0, DeepSpeed halves the loss scale at every overflow.

        Here, a hysteresis that the user has set takes precedence.
        """
        zero = info.data.get("zero_optimization")
        if zero is None or zero.stage > 0 or "hysteresis" in fp16.model_fields_set:
            return fp16
        return fp16.model_copy(update={"hysteresis": 1})

    def why_idle(self, name: str) -> str | None:
        zero = self.zero_optimization
        sections = zero.offload_param, zero.offload_optimizer
        in_files = any(each and each.device == "nvme" for each in sections)
        if name == "aio" and not (in_files or self.activation_checkpointing.nvme_path):
            return "nothing is offloaded to nvme"
        return None

    @property
    def origin(self) -> Origin:
        """Where the configuration came from."""
        return self._origin

    @property
    def sixteen_bit_dtype(self) -> "torch.dtype | None":
        """The dtype to which a model is converted, or None if it keeps its own."""
        return _dtype("float16" if self.fp16.enabled else "bfloat16" if self.bf16.enabled else None)

    @property
    def compute_dtype(self) -> "torch.dtype":
        """Dtype of the gathered parameters: float16, bfloat16 or float32."""
        return self.sixteen_bit_dtype or _dtype("float32")

    @property
    def sum_dtype(self) -> "torch.dtype":
        """Dtype in which gradients are summed over micro-batches and kept for the step."""
        default = "bfloat16" if self.bf16.without_masters else "float32"
        return _dtype(self.data_types.grad_accum_dtype or default)

    @property
    def message_dtype(self) -> "torch.dtype | None":
        """Dtype in which gradients are sent and reduced, or None for the parameters' own."""
        return _dtype(self.communication_data_type)

    @property
    def buffer_dtype(self) -> "torch.dtype | None":
        """Dtype of floating-point buffers, or None if they keep their own."""
        return _dtype(self.data_types.buffer_dtype)

    @property
    def narrows_gradients(self) -> bool:
        """Whether 16-bit gradients that are not summed over micro-batches are kept in 16 bits.

        Nothing is lost by this if the sum over ranks has 16 bits too.
        """
        quantized = self.zero_optimization.zero_quantized_gradients
        return self.data_types.grad_accum_dtype is None and not quantized

    def with_shard_size(self, size: int) -> "Config":
        """A copy that shards over groups of `size` ranks, as the mesh does.

        Raises UsageError if `mics_shard_size` says otherwise."""
        zero = self.zero_optimization
        if zero.mics_shard_size not in (-1, 0, size):
            raise UsageError(
                f"zero_optimization.mics_shard_size is {zero.mics_shard_size}, and the mesh's "
                f"dimension shard has {size} ranks; delete the key"
            )
        zero = zero.model_copy(update={"mics_shard_size": size})
        copied = self.model_copy(update={"zero_optimization": zero})
        # Counts as given, so that the table at the start shows it.
        given = self._origin.given | {"zero_optimization.mics_shard_size"}
        copied._origin = replace(self._origin, given=given)
        return copied

    def resolve(self, world_size: int) -> "ResolvedConfig":
        """A copy with the three batch sizes completed by DeepSpeed's rule.

        Ranks that share their sequences count as one. Accumulation is 1 if it is neither given nor
        follows from the other numbers. Raises UsageError if the numbers contradict each other, or
        if neither train_batch_size nor train_micro_batch_size_per_gpu is known."""
        place, sharing = self._origin.place, self.sequence_parallel_size
        key = f"{place}: sequence_parallel_size"
        require_divisor(key, sharing, "the number of ranks", world_size)
        world_size //= sharing
        if self.data_parallel_size not in (None, world_size):
            ranks = f"groups of {sharing} ranks" if sharing > 1 else "ranks"
            raise UsageError(
                f"{place}: data_parallel_size: is {self.data_parallel_size}, and the number of "
                f"{ranks} is {world_size}; delete it"
            )
        train = self.train_batch_size
        micro = self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if train is None and micro is None:
            auto = {"train_batch_size", "train_micro_batch_size_per_gpu"} & self._origin.auto
            state = "still 'auto'" if auto else "missing"
            raise UsageError(
                f"{place}: train_micro_batch_size_per_gpu: is {state}, and train_batch_size is not "
                "given either; set one of them to a number"
            )
        if train and micro:
            steps = steps or train // (micro * world_size)
        steps = steps or 1
        micro = micro or (train or 0) // (steps * world_size)
        train = train or micro * steps * world_size
        if train != micro * steps * world_size:
            raise UsageError(f"{place}: train_batch_size: {self.batch_mismatch(world_size)}")
        sizes: dict[str, Any] = {"train_batch_size": train, "gradient_accumulation_steps": steps}
        sizes["train_micro_batch_size_per_gpu"] = micro
        resolved = ResolvedConfig.model_construct(**dict(self) | sizes)
        resolved._origin = self._origin
        return resolved

    def batch_mismatch(self, world_size: int | None = None) -> str:
        """Says how `train_batch_size` differs from the product of the numbers that are given."""
        names = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        factors = [f"{name} {value}" for name, value in given.items()]
        if world_size is not None:
            shared = self.sequence_parallel_size > 1
            ranks = "world size / sequence_parallel_size" if shared else "world size"
            factors.append(f"{ranks} {world_size}")
        text = f"{self.train_batch_size} is not"
        if world_size is None or len(given) < 2:
            return f"{text} a whole multiple of {' x '.join(factors)}"
        product = math.prod(given.values()) * world_size
        return f"{text} {' x '.join(factors)} = {product}; change one of them or leave one out"


class ResolvedConfig(Config):
    """A configuration whose batch sizes are known. Made by :meth:`Config.resolve`."""

    model_config = ConfigDict(defer_build=True)  # it is never validated again

    if TYPE_CHECKING:
        train_batch_size: int = 1
        train_micro_batch_size_per_gpu: int = 1
        gradient_accumulation_steps: int = 1


def _dtype(name: str | None) -> Any:
    import torch  # here: it takes seconds, and reading a configuration does without it

    return None if name is None else getattr(torch, name)
