"""The names under `deepspeed` that transformers, accelerate and training scripts use, and what each
of them is here.

A name that is not listed is an error that says so: a clear message is better than a stub that does
nothing. This file does not import what it lists. `finder` resolves a name when it is first used.
"""

from __future__ import annotations

from zero.errors import FOLLOWED_RELEASE

# transformers and accelerate compare the version with 0.9.3 up to 0.18.2 before they use a feature.
# This is the release whose configuration keys and call signatures zero follows; zero's own version
# is `zero.__version__`.
REPORTED_VERSION = FOLLOWED_RELEASE
MAJOR, MINOR, PATCH = map(int, REPORTED_VERSION.split("."))
GIT_HASH = GIT_BRANCH = "none"

_SAFE = """.fragments safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
    safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
    safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
    safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized"""
_ZERO = "zero GatheredParameters Init register_external_parameter unregister_external_parameter"
_TILES = ".tiling TiledLinear TiledLinearReturnBias"
_OFFLOAD = """zero.config DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizerConfig
    DeepSpeedZeroOffloadParamConfig=OffloadParamConfig"""
_CHECKPOINTING = (
    ".utilities checkpoint configure is_configured reset non_reentrant_checkpoint=checkpoint"
)

# A line without indentation has: DeepSpeed's module, the module here, the names. `new=old`: the
# name is `new` in DeepSpeed's module and `old` in the module here. A module that begins with a dot
# is one of `zero.integrations.deepspeed`. `*` stands for all other names.
_TABLE = f"""
deepspeed .names __version__=REPORTED_VERSION __version_major__=MAJOR __version_minor__=MINOR __version_patch__=PATCH
    __git_hash__=GIT_HASH __git_branch__=GIT_BRANCH
deepspeed .engine initialize DeepSpeedEngine
deepspeed .distributed init_distributed
deepspeed .tensor tp_model_init
deepspeed .utilities OnDevice add_config_arguments
deepspeed zero.errors DeepSpeedConfigError=UsageError
deepspeed.accelerator .accelerator get_accelerator is_current_accelerator_supported
deepspeed.checkpoint .checkpoints get_model_ckpt_name_for_rank UNIVERSAL_CHECKPOINT_INFO
deepspeed.checkpoint.ds_to_universal .checkpoints main=convert_to_universal
deepspeed.checkpoint.constants .checkpoints UNIVERSAL_CHECKPOINT_INFO
deepspeed.checkpoint.utils .checkpoints clone_tensors_for_torch_save get_model_ckpt_name_for_rank
deepspeed.checkpointing {_CHECKPOINTING}
deepspeed.comm .distributed init_distributed is_initialized get_local_rank
deepspeed.comm zero.monitor log_summary
deepspeed.comm zero.comm.world get_rank get_world_size get_world_group
deepspeed.comm torch.distributed ReduceOp all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all
    all_to_all_single barrier broadcast broadcast_object_list destroy_process_group gather get_backend get_global_rank
    irecv is_available isend monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_tensor scatter send
deepspeed.git_version_info .names version=REPORTED_VERSION git_hash=GIT_HASH git_branch=GIT_BRANCH
deepspeed.git_version_info .utilities torch_info=TORCH_INFO
deepspeed.launcher.runner .utilities DEEPSPEED_ENVIRONMENT_NAME
deepspeed.moe.utils .utilities split_params_into_different_moe_groups_for_optimizer
deepspeed.ops .utilities __compatible_ops__=COMPATIBLE_OPS
deepspeed.ops.adagrad .optimizers DeepSpeedCPUAdagrad
deepspeed.ops.adam .optimizers DeepSpeedCPUAdam FusedAdam
deepspeed.ops.aio .utilities AsyncIOBuilder
deepspeed.ops.lion .optimizers DeepSpeedCPULion FusedLion
deepspeed.ops.op_builder .utilities AsyncIOBuilder CPUAdamBuilder CPUAdagradBuilder CPULionBuilder FusedAdamBuilder
    NotImplementedBuilder FusedLambBuilder=NotImplementedBuilder QuantizerBuilder=NotImplementedBuilder
deepspeed.runtime.activation_checkpointing.checkpointing {_CHECKPOINTING}
deepspeed.runtime.base_optimizer .optimizer DeepSpeedOptimizer ZeROOptimizer=DeepSpeedOptimizer
deepspeed.runtime.config .configuration ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER DeepSpeedConfig LION_OPTIMIZER
    get_gradient_clipping get_log_level
deepspeed.runtime.config_utils .configuration DeepSpeedConfigModel
deepspeed.runtime.constants .configuration GRADIENT_CLIPPING_DEFAULT LOG_LEVEL_DEFAULT
deepspeed.runtime.engine .engine DeepSpeedEngine
deepspeed.runtime.lr_schedules .lr_schedules *
deepspeed.runtime.precision_config .configuration get_bfloat16_config DeepSpeedFP16Config
deepspeed.runtime.precision_config zero.config DeepSpeedBF16Config=BF16Config
deepspeed.runtime.sequence_parallel.parallel_state_sp .sequence initialize_sequence_parallel
    get_sequence_parallel_group get_sequence_parallel_world_size get_sequence_parallel_rank
    get_model_parallel_group=get_sequence_parallel_group get_model_parallel_rank=get_sequence_parallel_rank
    get_model_parallel_world_size=get_sequence_parallel_world_size
deepspeed.runtime.sequence_parallel.parallel_state_sp zero.comm.world get_sequence_data_parallel_group=get_world_group
    get_sequence_data_parallel_world_size=get_world_size get_sequence_data_parallel_rank=get_rank
deepspeed.runtime.sequence_parallel.ulysses_sp .sequence UlyssesSPAttentionHF
deepspeed.runtime.sequence_parallel.ulysses_sp .sequence_loader UlyssesSPDataLoaderAdapter
deepspeed.runtime.sequence_parallel.ulysses_sp .sequence_tiles TiledFusedLogitsLoss TiledMLP sequence_tiled_compute
deepspeed.runtime.swap_tensor .utilities MIN_SWAPPABLE_BYTES
deepspeed.runtime.utils .utilities see_memory_usage
deepspeed.runtime.zero {_ZERO}
deepspeed.runtime.zero {_TILES}
deepspeed.runtime.zero .utilities unwrap_model_for_generation
deepspeed.runtime.zero .labels ZeroParamStatus
deepspeed.runtime.zero.config .configuration DeepSpeedZeroConfig
deepspeed.runtime.zero.config {_OFFLOAD}
deepspeed.runtime.zero.leaf_module_config .configuration DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES
    DEFAULT_LEAF_MODULE_NAME_SUFFIXES DeepSpeedZeroLeafModuleConfig
deepspeed.runtime.zero.linear torch.nn LinearModuleForZeroStage3=Linear
deepspeed.runtime.zero.linear torch.nn.functional zero3_linear_wrap=linear
deepspeed.runtime.zero.offload_config .configuration OffloadDeviceEnum OffloadStateTypeEnum
deepspeed.runtime.zero.offload_config {_OFFLOAD}
deepspeed.runtime.zero.partition_parameters {_ZERO}
deepspeed.runtime.zero.partition_parameters .accelerator get_accelerator
deepspeed.runtime.zero.partition_parameters .utilities zero_wrapper_for_fp_tensor_constructor
deepspeed.runtime.zero.partition_parameters torch _orig_torch_arange=arange
deepspeed.runtime.zero.partition_parameters .labels ZeroParamStatus
deepspeed.runtime.zero.stage3 .optimizer DeepSpeedZeroOptimizer_Stage3=DeepSpeedOptimizer
deepspeed.runtime.zero.stage3 .estimates estimate_zero3_model_states_mem_needs
    estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live
deepspeed.runtime.zero.stage_1_and_2 .optimizer DeepSpeedZeroOptimizer=DeepSpeedOptimizer
deepspeed.runtime.zero.stage_1_and_2 .estimates estimate_zero2_model_states_mem_needs
    estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live
deepspeed.runtime.zero.tiling {_TILES}
deepspeed.runtime.zero.utils zero.errors ZeRORuntimeException=UsageError
deepspeed.utils {_SAFE}
deepspeed.utils .leaf get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
    set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module
deepspeed.utils .utilities OnDevice RepeatingLoader log_dist logger set_log_level_from_string
deepspeed.utils.groups zero.comm.world get_data_parallel_group=get_world_group _get_data_parallel_group=get_world_group
    _get_sequence_data_parallel_group=get_world_group get_data_parallel_rank=get_rank
    _get_data_parallel_rank=get_rank _get_sequence_data_parallel_rank=get_rank
    get_data_parallel_world_size=get_world_size _get_data_parallel_world_size=get_world_size
    _get_sequence_data_parallel_world_size=get_world_size
deepspeed.utils.groups .distributed _get_data_parallel_group_ranks _get_sequence_parallel_group
    _get_sequence_parallel_world_size _get_sequence_parallel_rank
    get_model_parallel_world_size=one get_tensor_model_parallel_world_size=one _get_model_parallel_world_size=one
    _get_expert_model_parallel_world_size=one get_model_parallel_rank=zero
    get_tensor_model_parallel_rank=zero _get_broadcast_src_rank=zero
deepspeed.utils.init_on_device .utilities OnDevice
deepspeed.utils.logging .utilities log_dist logger set_log_level_from_string
deepspeed.utils.tensor_fragment {_SAFE}
deepspeed.utils.timer .timers NoopTimer SynchronizedWallClockTimer ThroughputTimer
deepspeed.utils.torch .utilities register_grad_hook required_torch_version
deepspeed.utils.zero_to_fp32 .checkpoints get_model_state_file get_optim_files
    convert_zero_checkpoint_to_fp32_state_dict
deepspeed.utils.zero_to_fp32 zero.checkpoint get_fp32_state_dict_from_zero_checkpoint
    load_state_dict_from_zero_checkpoint
deepspeed.zero {_ZERO}
deepspeed.zero {_TILES}
"""

# Names that scripts import and that have nothing behind them here. Each becomes a class that has no
# instances and raises an error when it is called.
_ABSENT = """
deepspeed.checkpoint.constants BASE_OPTIMIZER_STATE FP32_FLAT_GROUPS OPTIMIZER_STATE_DICT
deepspeed.moe.layer MoE
deepspeed.monitor.config DeepSpeedMonitorConfig get_monitor_config
deepspeed.monitor.monitor Monitor MonitorMaster
deepspeed.pipe LayerSpec PipelineModule TiedLayerSpec
deepspeed.profiling.flops_profiler FlopsProfiler get_model_profile
deepspeed.profiling.flops_profiler.profiler FlopsProfiler get_model_profile
deepspeed.runtime.bf16_optimizer BF16_Optimizer
deepspeed.runtime.fp16.fused_optimizer FP16_Optimizer
deepspeed.runtime.fp16.loss_scaler CreateLossScaler DynamicLossScaler LossScaleConfig LossScaleProfile LossScaler
    CONSECUTIVE_HYSTERESIS DELAYED_SHIFT INITIAL_LOSS_SCALE MIN_LOSS_SCALE SCALE_WINDOW
deepspeed.runtime.fp16.unfused_optimizer FP16_UnfusedOptimizer
deepspeed.runtime.hybrid_engine DeepSpeedHybridEngine
deepspeed.runtime.pipe.engine PipelineEngine
deepspeed.runtime.pipe.module PipelineModule
deepspeed.runtime.torch_autocast PARAM_COMM_DTYPE_ATTR_NAME get_comm_dtype has_comm_dtype
deepspeed.runtime.utils CheckOverflow call_to_str check_internal_apis_for_count_used_parameters clip_grad_norm_
    clip_tensors_by_global_norm count_used_parameters_in_backward get_global_norm get_weight_norm
deepspeed.runtime.zero.offload_states get_state_devices
deepspeed.runtime.zero.partition_parameters MultipleAllGatherHandles partitioned_param_data_shape
deepspeed.runtime.zero.stage_1_and_2 split_half_float_double
"""

# By DeepSpeed's module and name: "module:attribute" here; by `*`: the module here that has all
# other names.
NAMES: dict[str, dict[str, str]] = {}
ABSENT: dict[str, list[str]] = {}


def _read_tables() -> None:
    for line in _TABLE.strip().replace("\n    ", " ").splitlines():
        module, home, *names = line.split()
        home = f"zero.integrations.deepspeed{home}" if home.startswith(".") else home
        for name in names:
            new, _, old = name.partition("=")
            NAMES.setdefault(module, {})[new] = home if name == "*" else f"{home}:{old or new}"
    for line in _ABSENT.strip().replace("\n    ", " ").splitlines():
        module, *ABSENT[module] = line.split()
    for module in [*NAMES, *ABSENT]:
        for depth in range(1, module.count(".") + 2):
            NAMES.setdefault(".".join(module.split(".")[:depth]), {})


_read_tables()
