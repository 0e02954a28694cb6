"""The names under `deepspeed` which transformers, accelerate and training scripts use, and what each is here.

One entry for each module; in it, one for each attribute: `"module:attribute"` of this package, resolved at the first
use. A name which is not listed is an error that says so: better a clear message than a stub which does nothing.
"""

from __future__ import annotations

# transformers and accelerate compare the version with 0.9.3 up to 0.18.2 before they use a feature. This is the release
# whose configuration keys and call signatures zero follows; zero's own version is `zero.__version__`.
REPORTED_VERSION = "0.19.8"

NAMES: dict[str, dict[str, str]] = {
    "deepspeed": {
        "__version__": "zero.hf.names:REPORTED_VERSION",
        "initialize": "zero:initialize",
        "init_distributed": "zero.hf.definitions:init_distributed",
        "DeepSpeedEngine": "zero.engine:ZeroEngine",
    },
    "deepspeed.accelerator": {"get_accelerator": "zero.hf.accelerator:get_accelerator"},
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": {"clone_tensors_for_torch_save": "zero.hf.definitions:clone_tensors_for_torch_save"},
    "deepspeed.comm": {
        "init_distributed": "zero.hf.definitions:init_distributed",
        "is_initialized": "zero.hf.definitions:is_initialized",
        "get_rank": "zero.comm:get_rank",
        "get_world_size": "zero.comm:get_world_size",
    },
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": "zero.hf.definitions:DEEPSPEED_ENVIRONMENT_NAME"},
    "deepspeed.ops": {},
    "deepspeed.ops.adam": {"DeepSpeedCPUAdam": "zero.optim.cpu_adam:CPUAdam"},
    "deepspeed.runtime": {},
    "deepspeed.runtime.engine": {"DeepSpeedEngine": "zero.engine:ZeroEngine"},
    "deepspeed.runtime.lr_schedules": {"VALID_LR_SCHEDULES": "zero.optim.lr_schedules:VALID_LR_SCHEDULES"},
    "deepspeed.runtime.zero": {},
    "deepspeed.runtime.zero.partition_parameters": {
        "GatheredParameters": "zero:GatheredParameters",
        "Init": "zero:Init",
        "get_accelerator": "zero.hf.accelerator:get_accelerator",
        "zero_wrapper_for_fp_tensor_constructor": "zero.hf.definitions:zero_wrapper_for_fp_tensor_constructor",
        "_orig_torch_arange": "torch:arange",
    },
    "deepspeed.utils": {"logger": "zero.hf.definitions:logger"},
    "deepspeed.utils.zero_to_fp32": {
        "get_fp32_state_dict_from_zero_checkpoint": "zero.checkpoint:get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint": "zero.checkpoint:load_state_dict_from_zero_checkpoint",
    },
    "deepspeed.zero": {"GatheredParameters": "zero:GatheredParameters", "Init": "zero:Init"},
}
