"""The names under `deepspeed` that Hugging Face libraries, Lightning and the frameworks on top of
them import, and what stands for each of them here (counted in docs/compatibility.md, "Names").

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
GIT_HASH = "unknown"
# What a build of DeepSpeed was made for: "0.0" is a build without a device.
TORCH_INFO = dict.fromkeys(("version", "cuda_version", "nccl_version", "hip_version"), "0.0") | {
    "bf16_support": True
}
# The types of optimizers as DeepSpeed spells them.
ADAGRAD, ADAM, ADAMW, LAMB, LION, MUON = "adagrad", "adam", "adamw", "lamb", "lion", "muon"
# DeepSpeed keeps smaller tensors out of files.
MIN_SWAPPABLE_BYTES = 1024**2

# A line without indentation has DeepSpeed's module, the module here, and the names. `new=old`: the
# name is `new` in DeepSpeed's module and `old` in the module here. A module that begins with a dot
# is one of `zero.integrations.deepspeed`. `*` stands for all other names of the module here. With
# `!` in place of a module, the names can be imported, as frameworks do whether or not they use
# them, and to call them is an error that says what to use instead.
_TABLE = """
deepspeed .names __version__=REPORTED_VERSION version=REPORTED_VERSION
    __version_major__=MAJOR __version_minor__=MINOR __version_patch__=PATCH
    __git_hash__=GIT_HASH git_hash=GIT_HASH __git_branch__=GIT_HASH git_branch=GIT_HASH
deepspeed .names MUON_OPTIMIZER=MUON
deepspeed torch dist=distributed
deepspeed typing DeepSpeedOptimizerCallable=Callable DeepSpeedSchedulerCallable=Callable
deepspeed zero.errors DeepSpeedConfigError=UsageError
deepspeed .engine initialize DeepSpeedEngine
deepspeed .distributed init_distributed
deepspeed .tensor tp_model_init
deepspeed .optimizer DeepSpeedOptimizer
deepspeed .utilities add_config_arguments log_dist logger
deepspeed .accelerator get_accelerator
deepspeed .monitoring DeepSpeedConfig
deepspeed.accelerator .accelerator get_accelerator is_current_accelerator_supported
deepspeed.checkpoint.utils .checkpoints clone_tensors_for_torch_save
deepspeed.checkpointing .utilities checkpoint configure non_reentrant_checkpoint=checkpoint
deepspeed.comm .distributed init_distributed is_initialized get_local_rank
deepspeed.comm zero.monitor log_summary
deepspeed.comm zero.comm.world get_rank get_world_size get_world_group
deepspeed.comm torch.distributed * allgather_fn=all_gather_into_tensor
    get_all_ranks_from_group=get_process_group_ranks inference_all_reduce=all_reduce
    reduce_scatter_fn=reduce_scatter_tensor
deepspeed.elasticity ! compute_elastic_config
deepspeed.env_report zero.tools.cli cli_main=ds_report main=ds_report
deepspeed.git_version_info .names version=REPORTED_VERSION torch_info=TORCH_INFO
    git_hash=GIT_HASH git_branch=GIT_HASH
deepspeed.launcher.runner .utilities DEEPSPEED_ENVIRONMENT_NAME
deepspeed.launcher.runner zero.tools.cli main=deepspeed
deepspeed.moe.utils .utilities split_params_into_different_moe_groups_for_optimizer
deepspeed.module_inject.layers ! GatherReplacedLayerParams
deepspeed.monitor.monitor .monitoring MonitorMaster
deepspeed.ops .kernels __compatible_ops__=COMPATIBLE
deepspeed.ops.adagrad .optimizers DeepSpeedCPUAdagrad
deepspeed.ops.adam .optimizers DeepSpeedCPUAdam FusedAdam
deepspeed.ops.aio .kernels AsyncIOBuilder
deepspeed.ops.lamb zero.optim.lamb FusedLamb=Lamb
deepspeed.ops.lion .optimizers DeepSpeedCPULion FusedLion
deepspeed.ops.op_builder .kernels OpBuilder AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder
    CPULionBuilder FusedAdamBuilder FusedLambBuilder FusedLionBuilder
deepspeed.profiling.flops_profiler .profiling FlopsProfiler get_model_profile
deepspeed.profiling.flops_profiler.profiler .profiling FlopsProfiler get_model_profile
deepspeed.runtime.activation_checkpointing.checkpointing .utilities checkpoint configure
    non_reentrant_checkpoint=checkpoint
deepspeed.runtime.base_optimizer .optimizer DeepSpeedOptimizer
deepspeed.runtime.bf16_optimizer .optimizer BF16_Optimizer=DeepSpeedOptimizer
deepspeed.runtime.checkpoint_engine ! TorchCheckpointEngine
deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine ! TorchCheckpointEngine
deepspeed.runtime.config .monitoring DeepSpeedConfig
deepspeed.runtime.config .names ADAGRAD_OPTIMIZER=ADAGRAD ADAM_OPTIMIZER=ADAM ADAMW_OPTIMIZER=ADAMW
    LAMB_OPTIMIZER=LAMB LION_OPTIMIZER=LION MUON_OPTIMIZER=MUON
deepspeed.runtime.config zero.errors DeepSpeedConfigError=UsageError
deepspeed.runtime.dataloader .utilities RepeatingLoader
deepspeed.runtime.engine .engine DeepSpeedEngine
deepspeed.runtime.fp16.fused_optimizer .optimizer FP16_Optimizer=DeepSpeedOptimizer
deepspeed.runtime.fp16.loss_scaler ! DynamicLossScaler LossScaler
deepspeed.runtime.fp16.unfused_optimizer .optimizer FP16_UnfusedOptimizer=DeepSpeedOptimizer
deepspeed.runtime.lr_schedules .lr_schedules *
deepspeed.runtime.precision_config zero.config DeepSpeedBF16Config=BF16Config
    DeepSpeedFP16Config=FP16Config
deepspeed.runtime.sequence_parallel.ulysses_sp .sequence TiledMLP UlyssesSPAttentionHF
deepspeed.runtime.sequence_parallel.ulysses_sp .sequence_loader UlyssesSPDataLoaderAdapter
deepspeed.runtime.sequence_parallel.ulysses_sp ! SequenceTiledCompute TiledFusedLogitsLoss
    sequence_tiled_compute
deepspeed.runtime.swap_tensor .names MIN_SWAPPABLE_BYTES
deepspeed.runtime.utils .utilities move_to_device see_memory_usage set_random_seed
deepspeed.runtime.utils .gradients clip_grad_norm_
deepspeed.runtime.utils ! CheckOverflow
deepspeed.runtime.zero zero Init MiCS_Init=Init register_external_parameter
    unregister_external_parameter
deepspeed.runtime.zero .labels ZeroParamStatus
deepspeed.runtime.zero .weight_sync GatheredParameters
deepspeed.runtime.zero.config zero.config DeepSpeedZeroConfig=ZeroConfig
    DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizerConfig
    DeepSpeedZeroOffloadParamConfig=OffloadParamConfig
deepspeed.runtime.zero.linear torch.nn LinearModuleForZeroStage3=Linear
deepspeed.runtime.zero.linear torch.nn.functional zero3_linear_wrap=linear
deepspeed.runtime.zero.mics zero MiCS_Init=Init
deepspeed.runtime.zero.offload_config .utilities OffloadDeviceEnum OffloadStateTypeEnum
deepspeed.runtime.zero.offload_config zero.config
    DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizerConfig
    DeepSpeedZeroOffloadParamConfig=OffloadParamConfig
deepspeed.runtime.zero.partition_parameters .weight_sync GatheredParameters
deepspeed.runtime.zero.partition_parameters zero Init
deepspeed.runtime.zero.partition_parameters .labels ZeroParamStatus
deepspeed.runtime.zero.partition_parameters .accelerator get_accelerator
deepspeed.runtime.zero.partition_parameters .utilities zero_wrapper_for_fp_tensor_constructor
deepspeed.runtime.zero.partition_parameters torch _orig_torch_arange=arange
deepspeed.runtime.zero.stage3 .optimizer DeepSpeedZeroOptimizer_Stage3=DeepSpeedOptimizer
deepspeed.runtime.zero.stage_1_and_2 .optimizer DeepSpeedZeroOptimizer=DeepSpeedOptimizer
deepspeed.runtime.zero.utils zero.errors ZeRORuntimeException=UsageError
deepspeed.sequence.layer .sequence DistributedAttention
deepspeed.utils .gradients safe_get_full_grad
deepspeed.utils zero.fragments safe_get_full_fp32_param safe_get_full_optimizer_state
    safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
    safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
    safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
    safe_update_full_grad_vectorized
deepspeed.utils .leaf get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules
    set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module
deepspeed.utils ! z3_leaf_parameter
deepspeed.utils .distributed is_initialized
deepspeed.utils .utilities RepeatingLoader log_dist logger
deepspeed.utils.groups .distributed _get_data_parallel_group _get_data_parallel_rank
    _get_data_parallel_world_size
    _get_model_parallel_group _get_model_parallel_rank _get_model_parallel_world_size
    get_data_parallel_group=_get_data_parallel_group
    get_data_parallel_rank=_get_data_parallel_rank
    get_data_parallel_world_size=_get_data_parallel_world_size
    get_tensor_model_parallel_group=_get_model_parallel_group
    get_tensor_model_parallel_rank=_get_model_parallel_rank
    get_tensor_model_parallel_world_size=_get_model_parallel_world_size
    _get_sequence_parallel_group _get_sequence_parallel_rank _get_sequence_parallel_world_size
deepspeed.utils.logging .utilities log_dist logger
deepspeed.utils.zero_to_fp32 .checkpoints get_model_state_file get_optim_files
    convert_zero_checkpoint_to_fp32_state_dict
deepspeed.utils.zero_to_fp32 zero.checkpoint.models get_fp32_state_dict_from_zero_checkpoint
    load_state_dict_from_zero_checkpoint
deepspeed.zero .labels ZeroParamStatus
deepspeed.zero .weight_sync GatheredParameters
deepspeed.zero zero Init MiCS_Init=Init register_external_parameter
    unregister_external_parameter
"""

# What to use in place of names that zero does not have. The first entry counts that is a part of
# the full name.
_INSTEAD = {
    "tiled": "call zero.parallel.sequence.tiled, or tiled_loss",
    "leaf": "call z3_leaf_module with the module",
    "overflow": "read engine.optimizer.overflow after step()",
    "mem_needs": "zero estimate predicts the memory of a configuration",
    "unwrap_model": "call generate on all ranks, which gathers block by block",
    "ondevice": 'use torch.device("meta") as a context',
    "gatherreplaced": "call param.full_tensor() on all ranks",
    "checkpoint_engine": "checkpoints are safetensors files: call engine.save_checkpoint",
    "deepspeed.io": "checkpoints are safetensors files: call engine.save_checkpoint",
    "nebula": "checkpoint.async_save in the configuration saves in the background",
    "checkpointing": "call torch.utils.checkpoint, which restores random numbers",
    "autotun": "zero plan finds a configuration",
    "moe": "experts are ordinary modules, or transformers' models with experts, which train at "
    "every stage; see docs/migration.md, Not available",
    "data_pipeline": "batches come from the data loader of the script",
    "dataloader": "batches come from the data loader of the script, or initialize(training_data=)",
    "pipe": "pipelines are in zero.parallel.pipeline, see docs/pipeline-parallelism.md",
    "sequence": "see docs/sequence-parallelism.md",
    "sparse_attention": "use torch.nn.attention.flex_attention",
    "op_builder": "zero has one kernel, which is compiled when it is first used",
    "onebit": "take AdamW, and zero_quantized_gradients for smaller messages",
    "zeroone": "take AdamW, and zero_quantized_gradients for smaller messages",
    "transformer": "use torch.nn.TransformerEncoderLayer, or a model of transformers",
    "compression": "take torchao",
    "deepspeed.linear": "take PEFT",
    "elasticity": "torchrun restarts jobs with a different number of processes",
    "module_inject": "tensor_parallel.autotp_size in the configuration shares layers",
    "autotp": "tensor_parallel.autotp_size in the configuration shares layers",
    "domino": "tensor_parallel.autotp_size in the configuration shares layers",
    "launcher": "zero launch starts the ranks",
    "inference": "zero only trains models: save the model, and load it with transformers or vLLM",
    "hybrid": "zero only trains models: generate inside zero.GatheredParameters, or with vLLM",
    "fp16": "the engine has masters and loss scaling itself: enable fp16 in the configuration",
    "autocast": "enable bf16 in the configuration",
    "compile": "enable compile in the configuration",
    "triton": "call importlib.util.find_spec('triton')",
    "default_port": "the launcher sets MASTER_PORT",
    "ds_config": "call deepspeed.DeepSpeedConfig",
    "tp_model_init_": "set tensor_parallel.autotp_size in the configuration",
    # methods of the engine
    "allreduce": "backward has summed the gradients over the ranks",
    "all_gather": "call torch.distributed",
    "parallel_rank": "call the functions of deepspeed.utils.groups",
    "clip_": "set gradient_clipping in the configuration",
    "breakdown": "see docs/monitoring.md",
    "wall_clock": "see docs/monitoring.md",
    "curriculum": "batches come from the data loader of the script",
    "deepspeed_io": "pass training_data to initialize",
    "muon": "the optimizer of type Muon decides by itself which weights it updates so",
    "set_optimizer_flags": "the optimizer of type Muon finds its weights itself",
}
_ELSEWHERE = "see docs/compatibility.md, Names, and docs/migration.md, Not available"


def instead_of(full_name: str, otherwise: str = _ELSEWHERE) -> str:
    """What to use in place of a name that zero does not have, to follow a message."""
    name = full_name.lower()
    return next((text for part, text in _INSTEAD.items() if part in name), otherwise)


def _read_table() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in _TABLE.strip().replace("\n    ", " ").splitlines():
        module, home, *names = line.split()
        home = f"zero.integrations.deepspeed{home}" if home.startswith(".") else home
        for name in names:
            new, _, old = name.partition("=")
            place = f"{home}:{old or new}" if home != "!" else home
            found.setdefault(module, {})[new] = home if name == "*" else place
        while module := module.rpartition(".")[0]:  # its packages are modules too
            found.setdefault(module, {})
    return found


# By DeepSpeed's module and name: "module:attribute" here, or "!"; by `*`: the module here that has
# all other names.
NAMES = _read_table()
