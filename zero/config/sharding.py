"""The section ``zero_optimization``. See :mod:`zero.config.settings`."""

import math
import sys
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from zero.config.keys import (
    NOT_YET,
    Count,
    Int,
    Names,
    Positive,
    Section,
    acts,
    idle,
    integer,
    integral,
    only,
    unused,
)
from zero.config.offload import OffloadOptimizerConfig, OffloadParamConfig
from zero.errors import UsageError


class LeafModuleConfig(Section):
    """Modules whose parameters are all gathered together, for models in which ranks may run
    different submodules.
    """

    classes: Names = acts([], "Class names of such modules, with or without the module path.")
    names: Names = acts([], "Names of such modules in the model.")
    name_suffixes: Names = acts([], "Ends of such names.")


_STAGE_1_2 = "belongs to DeepSpeed's own stages 1 and 2; here every stage shards group by group"
_UNITS = "parameters are gathered group by group, one collective each"
_STAGE_3 = "stage 3"


def _even(elements: int) -> int:
    if elements % 2:
        # DeepSpeed's words, for what it refuses.
        raise ValueError(
            "allgather_bucket_size must be a multiple of nccl_start_alignment_factor, which is 2"
        )
    return elements


def _floor(value: Any) -> Any:
    # TRL writes 0.9 times a square.
    return math.floor(value) if isinstance(value, float) and math.isfinite(value) else value


class ZeroConfig(Section):
    """What is sharded, and how it is communicated.

    A *group* is a block of the model whose parameters are gathered together. Sizes are in elements.
    Keys that begin with `stage3_` keep DeepSpeed's names."""

    stage: integer(0, 3) = acts(
        0,
        auto="accelerate's zero_stage",
        says={
            0: "Every process holds the whole model, its gradients and its optimizer state.",
            1: "Each process holds a part of the optimizer state, and updates that part of the "
            "parameters.",
            2: "Each process holds a part of gradients and optimizer state. Parameters are whole "
            "everywhere.",
            3: "Each process holds a part of everything. A block is gathered for its forward and "
            "its backward.",
        },
    )
    """0: nothing is sharded. 1: the optimizer state. 2: gradients too. 3: parameters too."""
    contiguous_gradients: bool = acts(
        True,
        says={
            True: "Gradients are copied to their group's flat buffer once 2^26 elements are there.",
            False: "Gradients are copied to their group's flat buffer when the group has all of "
            "them.",
        },
    )
    """Copy gradients to their group's flat buffer once 2^26 elements are there. false: when the group has all of them."""
    overlap_comm: bool | None = acts(
        None,
        says={
            True: "Gradients are reduced while backward goes on.",
            False: "Backward waits for each reduction of gradients: slower on several processes, "
            "with the same result.",
        },
    )
    """Reduce gradients while backward goes on. false: wait for each reduction at once. Default: true at stage 3."""
    reduce_bucket_size: Positive = acts(
        int(5e8), auto="the square of the model's hidden size", unit="elements"
    )
    """Most gradient elements in one reduction, and in all reductions in flight. A larger group goes alone."""
    sub_group_size: Annotated[Count, AfterValidator(lambda size: size or sys.maxsize)] = acts(
        int(1e9),
        unit="elements",
        says={
            sys.maxsize: "The optimizer updates all elements at once.",
            "other": "The optimizer updates so many elements at a time.",
        },
    )
    """Elements that the optimizer updates at a time. 0: all at once."""
    elementwise_optimizer: bool | None = None
    """Whether the optimizer updates each element by that element's history alone. true: its state is cut as the weights
    are. false: each tensor is updated as a whole, on the process that owns it. Default: true for classes that are known
    to do so, else false."""
    offload_param: OffloadParamConfig | None = acts(None, needs=_STAGE_3)
    offload_optimizer: OffloadOptimizerConfig | None = None
    stage3_prefetch_bucket_size: Annotated[Count, BeforeValidator(_floor)] = acts(
        int(5e7),
        needs=_STAGE_3,
        auto="0.9 x the square of the model's hidden size",
        unit="elements",
        says={
            0: "Nothing is gathered ahead of its use: each block waits for its parameters.",
            "other": "At most so many elements are gathered ahead of their use.",
        },
    )
    """Most elements that are gathered ahead of their use. 0: none."""
    stage3_param_persistence_threshold: Count = acts(
        int(1e5), needs=_STAGE_3, auto="10 x the hidden size", unit="elements"
    )
    """Parameters of at most this many elements stay whole on every process."""
    stage3_model_persistence_threshold: Count = acts(sys.maxsize, needs=_STAGE_3, unit="elements")
    """Most elements that all of these small parameters may have in sum."""
    stage3_max_live_parameters: Count = acts(int(1e9), needs=_STAGE_3, unit="elements")
    """A block is gathered ahead, and stays gathered after its use, only while no more elements than this are gathered
    in all."""
    stage3_max_reuse_distance: Count = acts(
        int(1e9),
        needs=_STAGE_3,
        unit="elements",
        says={
            0: "Each group is freed after its use, and gathered again.",
            "other": "A gathered group is kept if fewer elements are used before it is needed "
            "again.",
        },
    )
    """Keep a gathered group if fewer elements are used before it is needed again. 0: free each group after its use."""
    stage3_gather_16bit_weights_on_model_save: bool = acts(
        False,
        needs=_STAGE_3,
        auto="accelerate's zero3_save_16bit_model",
        says={
            False: "`save_model` writes no whole weights. `zero consolidate` makes them of a "
            "checkpoint."
        },
    )
    """`save_model` writes a whole checkpoint that `from_pretrained` loads."""
    leaf_module: LeafModuleConfig | None = acts(None, needs=_STAGE_3)
    mics_shard_size: integer(-1) = acts(
        -1, says=dict.fromkeys((-1, 0), "What the stage shards is cut over all processes.")
    )
    """Hybrid sharding (MiCS): cut what the stage shards over this many consecutive processes, as those of one machine.
    Gradients are then averaged over these groups, which hold the same shards. -1 or 0: over all processes."""
    zero_hpz_partition_size: Count = acts(
        1, needs=_STAGE_3, says=dict.fromkeys((0, 1), "There is no second shard of the weights.")
    )
    """A second shard of the 16-bit weights (ZeRO++ hpZ), cut over this many consecutive processes: after the first
    all-gather of a step, all others stay within them. 0, 1 or all processes: none."""
    ignore_unused_parameters: bool = acts(
        True,
        "false: a parameter without a gradient is an error.",
        says={
            True: "A parameter may have no gradient in a step.",
            False: "A parameter without a gradient is an error.",
        },
    )
    zero_quantized_weights: bool = acts(False, needs=_STAGE_3)
    """Parameters are gathered as 8-bit integers with a scale for each block of 256. Masters, and what is saved, stay
    exact. See `docs/compression.md`."""
    zero_quantized_nontrainable_weights: bool = acts(False, needs=_STAGE_3)
    """The same for frozen parameters alone. Unlike in DeepSpeed, the shards keep their dtype."""
    zero_quantized_gradients: bool = False
    """Gradients travel as integers with a scale for each block of 256, and are summed in fp32."""
    zero_quantized_gradient_bits: Annotated[Literal[4, 8], BeforeValidator(integral)] = acts(8)
    """Not a key of DeepSpeed, which always sends 4. Bits of these integers: 8 or 4."""
    zero_quantized_moments: bool = False
    """Not a key of DeepSpeed. Adam's and AdamW's moments are 8-bit codes with an fp32 scale for each block of 256: 2.03
    bytes per parameter instead of 8. See `docs/optimizers.md`."""
    enable_sanity_checks: bool = False
    """Changing parameters inside `GatheredParameters(modifier_rank=None)` is an error: the change would be lost."""

    allgather_bucket_size: Annotated[Count, AfterValidator(_even)] = unused(int(5e8), _STAGE_1_2)
    allgather_partitions: bool = unused(True, _STAGE_1_2)
    reduce_scatter: bool = unused(True, "gradients are always reduce-scattered")
    use_multi_rank_bucket_allreduce: bool = unused(True, _STAGE_1_2)
    compute_grad_norm: only(bool, True, "the gradient norm is always computed") = True
    load_from_fp32_weights: bool = unused(
        True, "masters are always restored from their fp32 copies"
    )
    elastic_checkpoint: bool = unused(False, "removed from DeepSpeed's ZeRO-3 as well")
    legacy_stage1: bool = unused(False, _STAGE_1_2)
    round_robin_gradients: bool = unused(False, _STAGE_1_2)
    parameter_alignment: bool = unused(False, _STAGE_1_2)
    cpu_offload_use_pin_memory: bool | None = unused(
        None, "superseded by pin_memory in the offload sections"
    )
    stage3_module_granularity_threshold: Int = unused(0, _UNITS)
    stage3_use_all_reduce_for_fetch_params: bool = unused(False, _UNITS)
    stage3_allgather_sequential: bool = unused(False, _UNITS)
    mics_hierarchical_params_gather: bool = unused(
        False, "all-gathers of MiCS stay within the shard group anyway"
    )
    memory_efficient_linear: bool = unused(True, "torch.nn.functional.linear is left as it is")
    pipeline_loading_checkpoint: bool = unused(False, NOT_YET)
    override_module_apply: bool = unused(True, "Module.apply is left as it is")
    log_trace_cache_warnings: bool = unused(False, "the schedule is traced again without a warning")
    save_muon_momentum_buffer_in_memory: bool = unused(
        False, "Muon's momentum lives where offload_optimizer says"
    )
    zenflow: idle(
        "topk_ratio select_strategy select_interval update_interval overlap_step offload "
        "auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"
    ) = unused(None, NOT_YET)

    @model_validator(mode="after")
    def _overlap_by_default_at_stage_3(self) -> "ZeroConfig":
        if self.overlap_comm is None:
            # Not as an attribute, which would count as given.
            vars(self)["overlap_comm"] = self.stage == 3
        return self

    def why_idle(self, key: str) -> str | None:
        if self.stage < 3 and self.about(key).get("needs") == _STAGE_3:
            return f"acts at stage 3, this is {self.stage}"
        if key == "zero_quantized_gradient_bits" and not self.zero_quantized_gradients:
            return "zero_quantized_gradients is not set"
        return super().why_idle(key)

    def shards_over(self, world_size: int) -> int:
        """The number of ranks over which a group is cut.

        Raises UsageError if the world cannot be divided into the groups of `mics_shard_size` or of
        hpZ."""
        found = {key: getattr(self, key) for key in ("mics_shard_size", "zero_hpz_partition_size")}
        for key, size in found.items():
            if size > 1 and world_size % size:
                message = f"is {size}, which does not divide the number of processes, {world_size}"
                raise UsageError(f"zero_optimization.{key} {message}")
        mics, second = found.values()
        if mics > 0 and second > 1 and self.stage == 3:
            raise UsageError(
                f"zero_optimization: mics_shard_size (or a mesh) {mics} and "
                f"zero_hpz_partition_size {second} are two "
                "ways to keep all-gathers within a group: give one of them"
            )
        return mics if mics > 0 else world_size

    def second_shards_over(self, world_size: int) -> int:
        """The number of ranks over which hpZ cuts a group's second shard; 0 if there is none.

        Below stage 3 every rank holds all parameters on its device, and in a single group the first
        shard serves."""
        size = self.zero_hpz_partition_size
        return size if self.stage == 3 and 1 < size < world_size else 0

    def use_shard_size(self, size: int) -> None:
        """Take `mics_shard_size` from a mesh.

        Raises UsageError if the configuration says otherwise.
        """
        if self.mics_shard_size not in (-1, 0, size):
            raise UsageError(
                f"zero_optimization.mics_shard_size is {self.mics_shard_size}, and the mesh's "
                "dimension shard has "
                f"{size} ranks; delete the key"
            )
        self.mics_shard_size = size  # counts as given: the table at the start shows it

    @property
    def offloads_params(self) -> bool:
        """Only at stage 3: below it, every rank holds all parameters on its device."""
        return (
            self.stage == 3
            and self.offload_param is not None
            and self.offload_param.device != "none"
        )

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"
