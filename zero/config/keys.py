"""Every key of a DeepSpeed 0.19 configuration that this engine knows but does not act on, and the rules for old keys.

A key is declared once, as a field of its section:

- ``key: bool = True`` acts as documented by DeepSpeed; such keys live in :mod:`zero.config`;
- ``key: bool = unused(True, reason)`` is a valid key without effect, listed with the reason when a user sets it;
- ``key: only(bool, True, reason) = True`` would change the result if it were ignored: any other value is an error.

So a key that gains an effect is one edited line. Names, types and bounds follow DeepSpeed 0.19.8
(``runtime/config.py``, ``runtime/zero/config.py`` and the section files they import).
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator


class Section(BaseModel):
    """One JSON object of the configuration: unknown keys are errors and no value is converted silently."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, protected_namespaces=())

    def idle(self, key: str) -> str | None:
        """Why `key` has no effect; None if it acts."""
        return (type(self).model_fields[key].json_schema_extra or {}).get("unused")


def unused(default: Any, reason: str) -> Any:
    """A field for a valid key without effect; ``reason`` is what the user is told."""
    return Field(default, json_schema_extra={"unused": reason})


def only(kind: Any, value: Any, reason: str) -> Any:
    """An annotation that accepts ``value`` alone: ignoring another one would change what is computed."""

    def check(given: Any) -> Any:
        if given != value:
            raise ValueError(f"{given!r} is not available: {reason}; use {value!r}")
        return given

    return Annotated[kind, AfterValidator(check), Field(json_schema_extra={"only": value})]


def _integral(value: Any) -> Any:
    # JSON has no integers in scientific notation: 1e9 arrives as a float and means 1000000000.
    return int(value) if type(value) is float and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral)]
Count = Annotated[Int, Field(ge=0)]
Positive = Annotated[Int, Field(gt=0)]


_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float32: ("fp32", "float32", "float", "torch.float32"),
        torch.float16: ("fp16", "float16", "half", "torch.float16"),
        torch.bfloat16: ("bf16", "bfloat16", "torch.bfloat16"),
    }.items()
    for name in names
}


def _parse_dtype(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() not in _DTYPES:
        raise ValueError(f"expected one of 'fp32', 'fp16', 'bf16', got {value!r}")
    return _DTYPES[value.lower()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parse_rates(value: Any) -> Any:
    if _is_number(value) or (isinstance(value, list) and value and all(map(_is_number, value))):
        return value
    raise ValueError(f"expected a number or a list with one number a parameter group, got {value!r}")


def _is_beta(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _parse_betas(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_beta, value)):
        return tuple(value)
    raise ValueError(f"expected a list of two numbers of at least 0 and less than 1, got {value!r}")


def _parse_names(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    raise ValueError(f"expected a name or a list of names, got {value!r}")


Names = Annotated[list[str], PlainValidator(_parse_names)]
Flag = Annotated[bool, BeforeValidator(lambda value: bool(value) if value in (0, 1) else value)]
TagValidation = Annotated[
    Literal["Ignore", "Warn", "Fail"],
    BeforeValidator(lambda value: value.capitalize() if isinstance(value, str) else value),
]
DType = Annotated[torch.dtype | None, PlainValidator(_parse_dtype)]
Rates = Annotated[float | list[float], PlainValidator(_parse_rates)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Betas = Annotated[tuple[float, float], PlainValidator(_parse_betas)]


NOT_YET = "not available yet"
_TORCH_PROFILER = "not measured here; use torch.profiler"
_TRACKERS = "metrics are written by the Trainer's report_to"
_NO_TENSOR_PARALLEL = "the model is sharded over data-parallel ranks only"


def _without_tensor_parallel(section: dict | None) -> dict | None:
    if section and section.get("autotp_size", 0) not in (0, 1):
        raise ValueError(f"autotp_size {section['autotp_size']} is not available: {_NO_TENSOR_PARALLEL}; use 1")
    return section


class SectionsWithoutEffect(Section):
    """The top-level keys of DeepSpeed that do nothing here."""

    prescale_gradients: bool = unused(False, "gradients are averaged by one reduction; the mean is the same")
    gradient_predivide_factor: float = unused(1.0, "gradients are averaged by one reduction; the mean is the same")
    sequence_parallel_size: only(Int, 1, "sequence parallelism is not part of this engine") = 1
    data_parallel_size: Positive | None = unused(None, "every rank is a data-parallel rank")
    disable_allgather: bool = unused(False, "parameters are gathered unit by unit, never after the step")
    seq_parallel_communication_data_type: str | None = unused(None, "there is no sequence parallelism")
    dump_state: bool = unused(False, "the engine keeps no such dump; log the model instead")
    disable_python_gc: bool = unused(False, "call gc.disable() in the script")
    vocabulary_size: Count | None = unused(None, "DeepSpeed only warns about its alignment")
    use_dynamic_tiling: bool = unused(False, "in published configurations, and read nowhere in DeepSpeed")
    memory_breakdown: bool = unused(False, _TORCH_PROFILER)
    dataloader_drop_last: bool = unused(False, "batches come from the script's own data loader")
    log_level: str | None = unused(None, "set the level of the logger 'zero'")
    use_data_before_expert_parallelism: bool = unused(False, "there is no expert parallelism")
    datastates_ckpt: dict | bool | None = unused(None, NOT_YET)
    weight_quantization: dict | None = unused(None, "weights are not quantized")
    pipeline: dict | None = unused(None, "there is no pipeline parallelism")
    data_efficiency: dict | None = unused(None, "batches come from the script's own data loader")
    hybrid_engine: dict | None = unused(None, "generation runs on the training engine")
    torch_autocast: dict | None = unused(None, "precision follows fp16 and bf16; use torch.autocast in the script")
    flops_profiler: dict | None = unused(None, _TORCH_PROFILER)
    comms_logger: dict | None = unused(None, _TORCH_PROFILER)
    timers: dict | None = unused(None, _TORCH_PROFILER)
    tensorboard: dict | None = unused(None, _TRACKERS)
    wandb: dict | None = unused(None, _TRACKERS)
    csv_monitor: dict | None = unused(None, _TRACKERS)
    comet: dict | None = unused(None, _TRACKERS)
    autotuning: dict | None = unused(None, "settings are never searched for; what the file says is used")
    compile: dict | None = unused(None, "there is no DeepCompile")
    tensor_parallel: Annotated[dict | None, AfterValidator(_without_tensor_parallel)] = unused(
        None, _NO_TENSOR_PARALLEL
    )
    expert_parallel: dict | None = unused(None, _NO_TENSOR_PARALLEL)


_REMOVED = "was removed from DeepSpeed (it is an error in 0.19 too)"
REMOVED_KEYS = {
    "amp": f"{_REMOVED}; use fp16 or bf16",
    "nebula": f"{_REMOVED}; delete it",
    "compression_training": f"{_REMOVED}; delete it",
    "quantize_training": f"{_REMOVED}; delete it",
    "sparse_gradients": f"{_REMOVED}; delete it",
    "eigenvalue": f"{_REMOVED}; delete it",
    "sparse_attention": f"{_REMOVED}; delete it",
    "elasticity": f"{_REMOVED}; set train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps",
    "graph_harvesting": f"{_REMOVED}; delete it",
    "curriculum_learning": f"{_REMOVED}; order the data in the script's own data loader",
    "progressive_layer_drop": f"{_REMOVED}; delete it",
    "zero_optimization.mics_shard_size": f"{_REMOVED}; delete it",
    "zero_optimization.mics_hierarchical_params_gather": f"{_REMOVED}; delete it",
    "zero_optimization.zeropp_loco_param": f"{_REMOVED}; delete it",
    "optimizer.params.max_grad_norm": "is not an optimizer setting; use gradient_clipping at the top level",
}

# Old name -> (new dotted key, new value from old value). A new value of None means: no longer needed, drop it.
DEPRECATED_KEYS = {
    "bfloat16": ("bf16", lambda value: value),
    "zero_optimization.cpu_offload": (
        "zero_optimization.offload_optimizer",
        lambda value: {"device": "cpu"} if value else None,
    ),
    "zero_optimization.cpu_offload_param": (
        "zero_optimization.offload_param",
        lambda value: {"device": "cpu"} if value else None,
    ),
    **{
        f"zero_optimization.{name}": (f"zero_optimization.stage3_{name}", lambda value: value)
        for name in (
            "gather_16bit_weights_on_model_save",
            "max_live_parameters",
            "max_reuse_distance",
            "model_persistence_threshold",
            "module_granularity_threshold",
            "param_persistence_threshold",
            "prefetch_bucket_size",
        )
    },
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        lambda value: value,
    ),
}

# What transformers (TrainingArguments) and accelerate (its DeepSpeed plugin) document as fillable by "auto".
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO_KEYS = frozenset(BATCH_KEYS) | {
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "zero_optimization.stage",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
}
# Keys whose "auto" somebody must have replaced by the time the engine starts: DeepSpeed has no default for them.
AUTO_WITHOUT_DEFAULT = ("zero_optimization.stage", "scheduler.params.total_num_steps")
