"""How a key of the configuration is declared, the types of values, and the top-level keys without
effect.

A key is declared once, as a field of its section. The tables of `docs/configuration.md`, the table
at the start of a run and the error messages all come from these declarations. Nothing here knows
the engine.

- ``key: bool = acts(True, text)`` acts; ``text`` says what it does.
- ``key: bool = unused(True, reason)`` is a valid key without effect; a user who sets it is told the
reason.
- ``key: idle("enabled job_name") = unused(None, reason)`` is a section without effect, with the
names of its keys.
- ``key: only(bool, True, reason) = True`` accepts one value: ignoring another one would change the
result.

Names, types and defaults follow DeepSpeed 0.19.8 (``runtime/config.py``, ``runtime/zero/config.py``
and the section files that they import)."""

import math
import sys
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    create_model,
)


class Origin(NamedTuple):
    """Where a configuration came from: a name for messages, and the user's own dict, unchanged.

    Dotted keys: `auto`, which were still "auto"; `ignored`, which resemble no key; `renamed` as
    (old, new)."""

    place: str = ""
    raw: dict = {}
    auto: frozenset[str] = frozenset()
    ignored: list[str] = []
    renamed: list[tuple[str, str]] = []


class Section(BaseModel):
    """One JSON object of the configuration.

    No value is converted silently. No number is infinite or NaN.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
    # Unknown keys are errors. In a lenient section only those that resemble a known key are.
    lenient: ClassVar[bool] = False

    @classmethod
    def about(cls, key: str) -> dict[str, Any]:
        """What `acts` or `unused` noted about a key: "unused", "needs", "auto", "unit" and "says",
        where they apply.
        """
        return cls.model_fields[key].json_schema_extra or {}

    def why_idle(self, key: str) -> str | None:
        """Why `key` has no effect; None if it acts."""
        return self.about(key).get("unused")


class IdleSection(Section):
    """A section without effect: its keys are checked, their values are not."""

    model_config = ConfigDict(
        use_attribute_docstrings=False
    )  # made by a function: pydantic would search for long
    lenient = True


def idle(keys: str, **typed: Any) -> Any:
    """A section without effect with these keys, or None.

    Only the values of the `typed` keys are checked.
    """
    fields = {**dict.fromkeys(keys.split(), Any), **typed}
    section = create_model(
        "IdleSection", __base__=IdleSection, **{key: (kind, None) for key, kind in fields.items()}
    )
    return section | None


def acts(
    default: Any,
    text: str | None = None,
    *,
    needs: str = "",
    auto: str = "",
    unit: str = "",
    says: dict[Any, str] | None = None,
) -> Any:
    """A field for a key with an effect.

    ``text`` says what it does; None: the docstring below the field does. ``needs`` names the
    setting without which the key does not act. ``auto`` names the argument of transformers or
    accelerate that replaces "auto"; without it "auto" is an error. For ``zero explain``: ``says``
    has a sentence for a value, or for all "other" ones, with the value at `{}`; ``unit`` is
    "elements", "bytes" or "power of 2"."""
    return Field(
        default,
        description=text,
        json_schema_extra={"needs": needs, "auto": auto, "unit": unit, "says": says or {}},
    )


def unused(default: Any, reason: str) -> Any:
    """A field for a valid key without effect; ``reason`` is what the user is told."""
    return Field(default, json_schema_extra={"unused": reason})


def only(kind: Any, value: Any, reason: str) -> Any:
    """An annotation that accepts ``value`` alone: ignoring another one would change what is
    computed.
    """

    def check(given: Any) -> Any:
        if given != value:
            raise ValueError(f"{given!r} is not available: {reason}; use {value!r}")
        return given

    return Annotated[
        kind,
        AfterValidator(check),
        Field(json_schema_extra={"unused": f"no other value is available: {reason}"}),
    ]


def choice(*values: str) -> Any:
    """One of these words, in any letter case."""

    def spelt(given: Any) -> Any:
        return next((value for value in values if str(given).lower() == value.lower()), given)

    return Annotated[Literal[values], BeforeValidator(spelt)]


def integral(value: Any) -> Any:
    # JSON has no integers in scientific notation: 1e9 arrives as a float and means 1000000000.
    return int(value) if type(value) is float and value.is_integer() else value


def integer(low: int, high: int = sys.maxsize) -> Any:
    return Annotated[int, Field(ge=low, le=high), BeforeValidator(integral)]


Int = Annotated[int, BeforeValidator(integral)]
Count = integer(0)
Positive = Annotated[int, Field(gt=0, le=sys.maxsize), BeforeValidator(integral)]


_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}


def _parse_dtype(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() not in _DTYPES:
        raise ValueError(f"expected one of 'fp32', 'fp16', 'bf16', got {value!r}")
    return _DTYPES[value.lower()]


def _lies_between(low: float, high: float, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value < high


def _per_group(high: float, what: str) -> Any:
    """A number of at least 0 and less than `high`, or a list with one for each parameter group."""

    def check(value: Any) -> Any:
        values = value if isinstance(value, list) and value else [value]
        if all(_lies_between(0, high, each) for each in values):
            return value
        raise ValueError(f"expected {what}, or a list with one a parameter group, got {value!r}")

    return Annotated[float | list[float], PlainValidator(check), WithJsonSchema({"type": what})]


def _parse_betas(value: Any) -> Any:
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(_lies_between(0, 1, each) for each in value)
    ):
        return tuple(value)
    raise ValueError(f"expected a list of two numbers of at least 0 and less than 1, got {value!r}")


def _parse_names(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    raise ValueError(f"expected a name or a list of names, got {value!r}")


Names = Annotated[
    list[str], PlainValidator(_parse_names), WithJsonSchema({"type": "a name or a list of names"})
]
Flag = Annotated[bool, BeforeValidator(lambda value: bool(value) if value in (0, 1) else value)]
DType = Annotated[
    torch.dtype | None,
    PlainValidator(_parse_dtype),
    WithJsonSchema({"enum": ["fp32", "fp16", "bf16"]}),
]
Rates = _per_group(math.inf, "a finite number of at least 0")
Momenta = _per_group(math.nextafter(1, 2), "a number from 0 to 1")
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Betas = Annotated[
    tuple[float, float],
    PlainValidator(_parse_betas),
    WithJsonSchema({"type": "two numbers from 0 to below 1"}),
]


NOT_YET = "not available yet"
_TORCH_PROFILER = "not measured here; use torch.profiler"
_TRACKERS = "metrics are written by the Trainer's report_to"
_NO_AUTOCAST = (
    "the whole model has the dtype of fp16 or bf16; enable one, or enter "
    "torch.autocast "
    "in the script"
)


_RANDOM_LTD = idle(
    "enabled total_layer_num random_ltd_layer_num random_ltd_layer_id model_mask_name model_type "
    "hidden_state_order "
    "micro_batch_size global_batch_size sample_idx attention_mask",
    random_ltd_schedule=idle(
        "min_value max_value schedule_type", schedule_config=idle("require_steps seq_per_step")
    ),
    layer_token_lr_schedule=idle("enabled total_layer_tokens warmup_type warmup_layer_tokens"),
)


_DEEPCOMPILE = (
    "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
    "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
    "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
    "sync_after_allgather "
    "keep_int_input_tensors keep_all_input_tensors passes"
)


class _Quiet(Section):
    model_config = ConfigDict(
        use_attribute_docstrings=False
    )  # `create_model` below: pydantic would search for long


class CompileConfig(
    create_model(
        "DeepCompile",
        __base__=_Quiet,
        **{key: (Any, unused(None, "there is no DeepCompile")) for key in _DEEPCOMPILE.split()},
    )
):
    """`torch.compile` of each block, at every stage.

    `engine.compile()` and `--torch_compile` do the same.
    """

    enabled: bool = acts(
        False, "Compile the blocks when the engine is made. DeepSpeed had this key up to 0.14."
    )
    backend: str = acts("inductor", "Backend of `torch.compile`.", needs="enabled")
    kwargs: dict[str, Any] = acts(
        {}, "More arguments of `torch.compile`, such as `dynamic`.", needs="enabled"
    )


class SectionsWithoutEffect(Section):
    """The top-level keys of DeepSpeed that do nothing here."""

    lenient = True

    prescale_gradients: bool = unused(
        False, "gradients are averaged by one reduction; the mean is the same"
    )
    gradient_predivide_factor: float = unused(
        1.0, "gradients are averaged by one reduction; the mean is the same"
    )
    data_parallel_size: Positive | None = unused(
        None,
        "it is the number of processes that have batches of their own; another number is an error",
    )
    disable_allgather: bool = unused(
        False, "parameters are gathered group by group, never after the step"
    )
    seq_parallel_communication_data_type: str | None = unused(
        None, "what sequence parallelism exchanges keeps its dtype"
    )
    dump_state: bool = unused(False, "the engine keeps no such dump; log the model instead")
    disable_python_gc: bool = unused(False, "call gc.disable() in the script")
    vocabulary_size: Count | None = unused(None, "DeepSpeed only warns about its alignment")
    use_dynamic_tiling: bool = unused(
        False, "in published configurations, and read nowhere in DeepSpeed"
    )
    dataloader_drop_last: bool = unused(False, "batches come from the script's own data loader")
    use_data_before_expert_parallelism: bool = unused(
        False, "processes that share layers share experts"
    )
    datastates_ckpt: dict | bool | None = unused(None, NOT_YET)
    weight_quantization: idle(
        "enabled quantized_initialization post_init_quant q_type q_groups num_bits"
    ) = unused(None, "weights are not quantized")
    pipeline: idle(
        "stages partition seed_layers activation_checkpoint_interval pipe_partitioned "
        "grad_partitioned use_reentrant"
    ) = unused(None, "pipelines are made in the script: docs/pipeline_parallelism.md")
    data_efficiency: idle(
        "enabled seed",
        data_sampling=idle(
            "enabled num_epochs num_workers pin_memory dynamic_batching",
            curriculum_learning=idle("enabled data_cluster_path curriculum_metrics"),
        ),
        data_routing=idle("enabled", random_ltd=_RANDOM_LTD),
    ) = unused(None, "batches come from the script's own data loader")
    hybrid_engine: idle(
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size "
        "enable_cuda_graph"
    ) = unused(None, "generation runs on the training engine")
    torch_autocast: idle(
        "dtype lower_precision_safe_modules", enabled=only(bool, False, _NO_AUTOCAST)
    ) = unused(None, _NO_AUTOCAST)
    timers: idle("", throughput=idle("enabled synchronized")) = unused(None, _TORCH_PROFILER)
    comet: idle(
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key "
        "online mode"
    ) = unused(None, _TRACKERS)
    autotuning: idle(
        "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric "
        "metric_path "
        "tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path "
        "mp_size "
        "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes"
    ) = unused(None, "settings are never searched for; what the file says is used")


_REMOVED = "was removed from DeepSpeed (it is an error in 0.19 too)"
REMOVED_KEYS = {
    **dict.fromkeys(
        (
            *(
                "nebula",
                "compression_training",
                "quantize_training",
                "sparse_gradients",
                "eigenvalue",
            ),
            *("sparse_attention", "graph_harvesting", "progressive_layer_drop"),
            "zero_optimization.zeropp_loco_param",
        ),
        f"{_REMOVED}; delete it",
    ),
    "amp": f"{_REMOVED}; use fp16 or bf16",
    "elasticity": f"{_REMOVED}; set train_batch_size, train_micro_batch_size_per_gpu and "
    "gradient_accumulation_steps",
    "curriculum_learning": f"{_REMOVED}; order the data in the script's own data loader",
    "optimizer.params.max_grad_norm": "is not an optimizer setting; use gradient_clipping at the "
    "top level",
}


def _on_the_cpu(flag: Any) -> dict | None:
    if not isinstance(flag, bool | None):
        raise ValueError(f"expected true or false, got {flag!r}")
    return {"device": "cpu"} if flag else None


# Old name -> (new dotted key, new value from old value). A new value of None means: no longer
# needed, drop it.
DEPRECATED_KEYS = {
    "bfloat16": ("bf16", lambda value: value),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer", _on_the_cpu),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param", _on_the_cpu),
    **{
        f"zero_optimization.{name}": (f"zero_optimization.stage3_{name}", lambda value: value)
        for name in (
            *("gather_16bit_weights_on_model_save", "max_live_parameters", "max_reuse_distance"),
            *(
                "model_persistence_threshold",
                "module_granularity_threshold",
                "param_persistence_threshold",
            ),
            "prefetch_bucket_size",
        )
    },
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        lambda value: value,
    ),
}

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# "auto" must have been replaced in these before the engine starts: DeepSpeed has no default for
# them.
AUTO_WITHOUT_DEFAULT = ("zero_optimization.stage", "scheduler.params.total_num_steps")
