"""The names under `deepspeed` which transformers, accelerate and training scripts use, and what each is here.

One entry for each module; in it, one for each attribute: `"module:attribute"` of this package, resolved at the first
use; under `*`, a module that has all others. A name which is not listed is an error that says so: better a clear
message than a stub which does nothing.
"""

from __future__ import annotations

from zero.errors import FOLLOWED_RELEASE

# transformers and accelerate compare the version with 0.9.3 up to 0.18.2 before they use a feature. This is the release
# whose configuration keys and call signatures zero follows; zero's own version is `zero.__version__`.
REPORTED_VERSION = FOLLOWED_RELEASE
MAJOR, MINOR, PATCH = map(int, REPORTED_VERSION.split("."))
GIT_HASH = GIT_BRANCH = "none"


def _names(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


# fmt: off
_COLLECTIVES = _names(
    "torch.distributed", "ReduceOp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "destroy_process_group",
    "gather", "get_backend", "get_global_rank", "irecv", "is_available", "isend", "monitored_barrier", "new_group",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)
_SAFE = _names(
    "zero.deepspeed.fragments", "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param",
    "safe_set_full_grad", "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad",
    "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized",
)
_LEAF = _names(
    "zero.deepspeed.leaf", "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module",
)
_ZERO = _names("zero", "GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter")
# fmt: on

_DEFINITIONS, _TUNING = "zero.deepspeed.definitions", "zero.deepspeed.tuning"

NAMES: dict[str, dict[str, str]] = {
    "deepspeed": {
        "__version__": "zero.deepspeed.names:REPORTED_VERSION",
        "__version_major__": "zero.deepspeed.names:MAJOR",
        "__version_minor__": "zero.deepspeed.names:MINOR",
        "__version_patch__": "zero.deepspeed.names:PATCH",
        "__git_hash__": "zero.deepspeed.names:GIT_HASH",
        "__git_branch__": "zero.deepspeed.names:GIT_BRANCH",
        "initialize": "zero:initialize",
        "init_distributed": "zero.deepspeed.definitions:init_distributed",
        "DeepSpeedEngine": "zero.deepspeed.engine:DeepSpeedEngine",
        "DeepSpeedConfigError": "zero.errors:UsageError",
        "add_config_arguments": "zero.deepspeed.definitions:add_config_arguments",
    },
    "deepspeed.accelerator": {
        "get_accelerator": "zero.deepspeed.accelerator:get_accelerator",
        "is_current_accelerator_supported": "zero.deepspeed.accelerator:is_current_accelerator_supported",
    },
    "deepspeed.git_version_info": {
        "version": "zero.deepspeed.names:REPORTED_VERSION",
        "git_hash": "zero.deepspeed.names:GIT_HASH",
        "git_branch": "zero.deepspeed.names:GIT_BRANCH",
        "torch_info": "zero.deepspeed.definitions:TORCH_INFO",
    },
    "deepspeed.checkpoint": {
        **_names(_DEFINITIONS, "get_model_ckpt_name_for_rank"),
        **_names(_DEFINITIONS, "UNIVERSAL_CHECKPOINT_INFO"),
    },
    "deepspeed.checkpoint.constants": _names(_DEFINITIONS, "UNIVERSAL_CHECKPOINT_INFO"),
    "deepspeed.checkpoint.utils": _names(
        "zero.deepspeed.definitions", "clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank"
    ),
    "deepspeed.checkpointing": _names("zero.activations", "checkpoint", "configure", "is_configured", "reset"),
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        **_names("zero.activations", "checkpoint", "configure", "is_configured", "reset"),
        "non_reentrant_checkpoint": "zero.activations:checkpoint",
    },
    "deepspeed.comm": {
        "init_distributed": "zero.deepspeed.definitions:init_distributed",
        "is_initialized": "zero.deepspeed.definitions:is_initialized",
        "get_rank": "zero.comm:get_rank",
        "get_world_size": "zero.comm:get_world_size",
        "get_local_rank": "zero.deepspeed.definitions:get_local_rank",
        "get_world_group": "zero.comm:get_world_group",
        **_COLLECTIVES,
    },
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {
        "DEEPSPEED_ENVIRONMENT_NAME": "zero.deepspeed.definitions:DEEPSPEED_ENVIRONMENT_NAME"
    },
    "deepspeed.ops": {"__compatible_ops__": "zero.deepspeed.definitions:COMPATIBLE_OPS"},
    "deepspeed.ops.adagrad": _names("zero.deepspeed.optimizers", "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.adam": _names("zero.deepspeed.optimizers", "DeepSpeedCPUAdam", "FusedAdam"),
    "deepspeed.ops.lion": _names("zero.deepspeed.optimizers", "DeepSpeedCPULion", "FusedLion"),
    "deepspeed.ops.op_builder": {
        **_names(
            "zero.deepspeed.definitions",
            "AsyncIOBuilder",
            "CPUAdamBuilder",
            "CPUAdagradBuilder",
            "CPULionBuilder",
            "FusedAdamBuilder",
            "NotImplementedBuilder",
        ),
        "FusedLambBuilder": "zero.deepspeed.definitions:NotImplementedBuilder",
        "QuantizerBuilder": "zero.deepspeed.definitions:NotImplementedBuilder",
    },
    "deepspeed.ops.aio": _names(_DEFINITIONS, "AsyncIOBuilder"),
    "deepspeed.runtime": {},
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer": "zero.deepspeed.optimizer:DeepSpeedOptimizer",
        "ZeROOptimizer": "zero.deepspeed.optimizer:DeepSpeedOptimizer",
    },
    "deepspeed.runtime.engine": {"DeepSpeedEngine": "zero.deepspeed.engine:DeepSpeedEngine"},
    "deepspeed.runtime.config": _names(
        "zero.deepspeed.configuration",
        "ADAGRAD_OPTIMIZER",
        "ADAM_OPTIMIZER",
        "ADAMW_OPTIMIZER",
        "DeepSpeedConfig",
        "LION_OPTIMIZER",
        "get_gradient_clipping",
    ),
    "deepspeed.runtime.config_utils": _names("zero.deepspeed.configuration", "DeepSpeedConfigModel"),
    "deepspeed.runtime.constants": _names("zero.deepspeed.configuration", "GRADIENT_CLIPPING_DEFAULT"),
    "deepspeed.runtime.precision_config": {
        "get_bfloat16_config": "zero.deepspeed.configuration:get_bfloat16_config",
        "DeepSpeedBF16Config": "zero.config:BF16Config",
        "DeepSpeedFP16Config": "zero.deepspeed.configuration:DeepSpeedFP16Config",
    },
    "deepspeed.runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": "zero.deepspeed.definitions:MIN_SWAPPABLE_BYTES"},
    "deepspeed.runtime.utils": {"see_memory_usage": "zero.deepspeed.definitions:see_memory_usage"},
    "deepspeed.moe": {},
    "deepspeed.moe.utils": _names(_DEFINITIONS, "split_params_into_different_moe_groups_for_optimizer"),
    "deepspeed.runtime.lr_schedules": {
        "*": "zero.deepspeed.lr_schedules",
        **_names(_TUNING, "add_tuning_arguments", "get_config_from_args", "get_lr_from_config"),
        **_names(
            "zero.deepspeed.tuning",
            "override_1cycle_params",
            "override_lr_range_test_params",
            "override_warmupLR_params",
        ),
    },
    "deepspeed.runtime.zero": {
        **_ZERO,
        **_names("zero.deepspeed.tiling", "TiledLinear", "TiledLinearReturnBias"),
        **_names(_DEFINITIONS, "unwrap_model_for_generation"),
        "ZeroParamStatus": "zero.views:ZeroParamStatus",
    },
    "deepspeed.runtime.zero.config": {
        "DeepSpeedZeroConfig": "zero.deepspeed.configuration:DeepSpeedZeroConfig",
        "DeepSpeedZeroOffloadOptimizerConfig": "zero.config:OffloadOptimizerConfig",
        "DeepSpeedZeroOffloadParamConfig": "zero.config:OffloadParamConfig",
    },
    "deepspeed.runtime.zero.leaf_module_config": {
        **_names("zero.deepspeed.configuration", "DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES"),
        **_names("zero.deepspeed.configuration", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES", "DeepSpeedZeroLeafModuleConfig"),
    },
    "deepspeed.runtime.zero.offload_config": {
        **_names("zero.deepspeed.configuration", "OffloadDeviceEnum", "OffloadStateTypeEnum"),
        "DeepSpeedZeroOffloadOptimizerConfig": "zero.config:OffloadOptimizerConfig",
        "DeepSpeedZeroOffloadParamConfig": "zero.config:OffloadParamConfig",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": "zero.deepspeed.optimizer:DeepSpeedOptimizer",
        **_names("zero.deepspeed.estimates", "estimate_zero2_model_states_mem_needs"),
        **_names("zero.deepspeed.estimates", "estimate_zero2_model_states_mem_needs_all_cold"),
        **_names("zero.deepspeed.estimates", "estimate_zero2_model_states_mem_needs_all_live"),
    },
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": "zero.deepspeed.optimizer:DeepSpeedOptimizer",
        **_names("zero.deepspeed.estimates", "estimate_zero3_model_states_mem_needs"),
        **_names("zero.deepspeed.estimates", "estimate_zero3_model_states_mem_needs_all_cold"),
        **_names("zero.deepspeed.estimates", "estimate_zero3_model_states_mem_needs_all_live"),
    },
    "deepspeed.runtime.zero.utils": {"ZeRORuntimeException": "zero.errors:UsageError"},
    "deepspeed.runtime.zero.tiling": _names("zero.deepspeed.tiling", "TiledLinear", "TiledLinearReturnBias"),
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        "ZeroParamStatus": "zero.views:ZeroParamStatus",
        "get_accelerator": "zero.deepspeed.accelerator:get_accelerator",
        "zero_wrapper_for_fp_tensor_constructor": "zero.deepspeed.definitions:zero_wrapper_for_fp_tensor_constructor",
        "_orig_torch_arange": "torch:arange",
    },
    "deepspeed.utils": {
        **_names(_DEFINITIONS, "RepeatingLoader", "log_dist", "logger"),
        **_SAFE,
        **_LEAF,
    },
    "deepspeed.utils.groups": {"*": "zero.deepspeed.groups"},
    "deepspeed.utils.logging": _names(_DEFINITIONS, "log_dist", "logger"),
    "deepspeed.utils.tensor_fragment": _SAFE,
    "deepspeed.utils.timer": {"*": "zero.deepspeed.timers"},
    "deepspeed.utils.torch": _names(_DEFINITIONS, "register_grad_hook", "required_torch_version"),
    "deepspeed.utils.zero_to_fp32": {
        **_names("zero.deepspeed.recovery", "get_model_state_file", "get_optim_files"),
        "get_fp32_state_dict_from_zero_checkpoint": "zero.checkpoint:get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint": "zero.checkpoint:load_state_dict_from_zero_checkpoint",
        **_names(_DEFINITIONS, "convert_zero_checkpoint_to_fp32_state_dict"),
    },
    "deepspeed.zero": {**_ZERO, **_names("zero.deepspeed.tiling", "TiledLinear", "TiledLinearReturnBias")},
}

# Names that scripts import, often for one use among many, and that stand for nothing here: nothing is an instance of
# them, and who calls them is told so.
ABSENT: dict[str, tuple[str, ...]] = {
    "deepspeed.checkpoint.constants": ("BASE_OPTIMIZER_STATE", "FP32_FLAT_GROUPS", "OPTIMIZER_STATE_DICT"),
    "deepspeed.moe.layer": ("MoE",),
    "deepspeed.monitor.config": ("DeepSpeedMonitorConfig", "get_monitor_config"),
    "deepspeed.monitor.monitor": ("Monitor", "MonitorMaster"),
    "deepspeed.pipe": ("LayerSpec", "PipelineModule", "TiedLayerSpec"),
    "deepspeed.profiling.flops_profiler": ("FlopsProfiler", "get_model_profile"),
    "deepspeed.profiling.flops_profiler.profiler": ("FlopsProfiler", "get_model_profile"),
    "deepspeed.runtime.bf16_optimizer": ("BF16_Optimizer",),
    "deepspeed.runtime.fp16.fused_optimizer": ("FP16_Optimizer",),
    "deepspeed.runtime.fp16.loss_scaler": (
        *("CreateLossScaler", "DynamicLossScaler", "LossScaleConfig", "LossScaleProfile", "LossScaler"),
        *("CONSECUTIVE_HYSTERESIS", "DELAYED_SHIFT", "INITIAL_LOSS_SCALE", "MIN_LOSS_SCALE", "SCALE_WINDOW"),
    ),
    "deepspeed.runtime.fp16.unfused_optimizer": ("FP16_UnfusedOptimizer",),
    "deepspeed.runtime.hybrid_engine": ("DeepSpeedHybridEngine",),
    "deepspeed.runtime.pipe.engine": ("PipelineEngine",),
    "deepspeed.runtime.pipe.module": ("PipelineModule",),
    "deepspeed.runtime.torch_autocast": ("PARAM_COMM_DTYPE_ATTR_NAME", "get_comm_dtype", "has_comm_dtype"),
    "deepspeed.runtime.utils": (
        *("CheckOverflow", "call_to_str", "check_internal_apis_for_count_used_parameters", "clip_grad_norm_"),
        *("clip_tensors_by_global_norm", "count_used_parameters_in_backward", "get_global_norm", "get_weight_norm"),
    ),
    "deepspeed.runtime.zero.offload_states": ("get_state_devices",),
    "deepspeed.runtime.zero.partition_parameters": ("MultipleAllGatherHandles", "partitioned_param_data_shape"),
    "deepspeed.runtime.zero.stage_1_and_2": ("split_half_float_double",),
}
for _module in ABSENT:
    for _depth in range(2, _module.count(".") + 2):
        NAMES.setdefault(".".join(_module.split(".")[:_depth]), {})
