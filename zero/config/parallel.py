"""The section of ``ds_config.json`` about tensor parallelism. See :mod:`zero.config.settings`."""

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, create_model

from zero.config.keys import Count, Section, acts, unused

_OF_DEEPSPEED = (
    "tp_size tp_grain_size tp_overlap_comm tensor_parallel tp mpu dtype injection_policy_tuple partition_config "
    "preset_model vocab_parallel_lm_head vocab_parallel_ce_backend keep_module_on_host kernel_inject "
    "replace_with_kernel_inject"
)


class _Quiet(Section):
    model_config = ConfigDict(use_attribute_docstrings=False)  # `create_model` below: pydantic would search for long


class TensorParallelConfig(
    create_model(
        "DeepSpeedTensorParallel",
        __base__=_Quiet,
        **{key: (Any, unused(None, "the model's own tp_plan says what is cut")) for key in _OF_DEEPSPEED.split()},
    )
):
    """Tensor parallelism: neighbouring processes have a part of each layer, and work on the same batch."""

    autotp_size: Annotated[Count, AfterValidator(lambda size: size or 1)] = acts(
        1, "Neighbouring processes that share each layer. 0 or 1: none. See `docs/tensor_parallelism.md`."
    )
