"""The sections of ``ds_config.json`` about tensor and expert parallelism.

See :mod:`zero.config.settings`.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, create_model

from zero.config.keys import Count, Section, acts, unused

_OF_DEEPSPEED = (
    "tp_size tp_grain_size tp_overlap_comm tensor_parallel tp mpu dtype injection_policy_tuple "
    "partition_config "
    "preset_model vocab_parallel_lm_head vocab_parallel_ce_backend keep_module_on_host "
    "kernel_inject "
    "replace_with_kernel_inject"
)
_OF_AUTOEP = (
    "expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model "
    "moe_layer_pattern "
    "expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm route_scale "
    "score_apply "
    "combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin "
    "comm_max_tokens_per_rank "
    "num_expert_groups num_limited_groups score_func top_k load_balance_coeff "
    "routed_scaling_factor expert_w1 "
    "expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern "
    "shared_experts_gate_pattern expert_activation"
)


class _Quiet(Section):
    model_config = ConfigDict(
        use_attribute_docstrings=False
    )  # `create_model` below: pydantic would search for long


class TensorParallelConfig(
    create_model(
        "DeepSpeedTensorParallel",
        __base__=_Quiet,
        **{
            key: (Any, unused(None, "the model's own tp_plan says what is cut"))
            for key in _OF_DEEPSPEED.split()
        },
    )
):
    """Tensor parallelism: neighbouring processes have a part of each layer, and work on the same
    batch.
    """

    autotp_size: Annotated[Count, AfterValidator(lambda size: size or 1)] = acts(
        1,
        "Neighbouring processes that share each layer. 0 or 1: none. See "
        "`docs/tensor_parallelism.md`.",
        says={
            1: "Each process has whole layers: there is no tensor parallelism.",
            "other": "{} neighbouring processes share each layer. See "
            "`docs/tensor_parallelism.md`.",
        },
    )


class ExpertParallelConfig(
    create_model(
        "DeepSpeedExpertParallel",
        __base__=_Quiet,
        **{
            key: (Any, unused(None, "the model's own ep_plan says what is cut"))
            for key in _OF_AUTOEP.split()
        },
    )
):
    """Expert parallelism: the processes that share layers have some of the experts each.

    Tokens travel to them.
    """

    enabled: bool = acts(False, "Share the experts. See `docs/tensor_parallelism.md`.")
    autoep_size: Count = acts(
        1, "Processes that do so: as many as `tensor_parallel.autotp_size`.", needs="enabled"
    )

    @property
    def size(self) -> int:
        """Processes that share the experts of a layer; 1: none."""
        return max(1, self.autoep_size) if self.enabled else 1
