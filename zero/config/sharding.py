"""The section ``zero_optimization``."""

import math
import sys
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from zero.config.idle import with_idle_keys
from zero.config.keys import WHOLE, Count, Names, Positive, Section, key
from zero.config.offload import OffloadOptimizerConfig, OffloadParamConfig
from zero.errors import UsageError, require_divisor


class LeafModuleConfig(Section):
    """Modules whose parameters are all gathered together.

    Mark a module here if ranks may run different submodules of it, such as a mixture of experts.

    Attributes:
        classes: Class names, with or without the module path.
        names: Names within the model.
        name_suffixes: Endings of such names.
    """

    classes: Names = []
    names: Names = []
    name_suffixes: Names = []


_STAGE_3 = "stage 3"


def _floor(value: Any) -> Any:
    # TRL writes 0.9 times a square.
    return math.floor(value) if isinstance(value, float) and math.isfinite(value) else value


@with_idle_keys("zero_optimization")
class ZeroConfig(Section):
    """The ZeRO stage, and how parameters and gradients are sharded and communicated.

    A *block* is a part of the model whose parameters are gathered together, such as a transformer
    layer. Sizes are numbers of elements, not bytes.

    Attributes:
        stage: What is sharded. 0: nothing. 1: the optimizer state. 2: the gradients too. 3: the
            parameters too.
            - 0: Every process holds the whole model, its gradients and its optimizer state.
            - 1: Each process holds a part of the optimizer state, and updates that part of the
              parameters.
            - 2: Each process holds a part of gradients and optimizer state. Parameters are whole
              everywhere.
            - 3: Each process holds a part of everything. A block is gathered for its forward and
              for its backward pass.
        contiguous_gradients: Copy gradients to the block's flat buffer in chunks of 2^26 elements.
            `false`: once all of them are ready.
            - true: Gradients are copied to their block's flat buffer in chunks of 2^26 elements.
            - false: Gradients are copied to their block's flat buffer once all of them are ready.
        overlap_comm: Reduce gradients while the backward pass continues. Default: true at stage 3.
            - true: Gradients are reduced while the backward pass continues.
            - false: The backward pass waits for each reduction of gradients. This is slower on
              several processes, and gives the same result.
        reduce_bucket_size: The most gradient elements that are being reduced at a time. A larger
            block is reduced by itself.
        sub_group_size: Elements that the optimizer updates at a time. 0: all. Very small numbers
            are raised, up to 65,536.
            - 0: The optimizer updates all elements at once.
            - N: The optimizer updates this many elements at a time.
        elementwise_optimizer: Whether the optimizer updates each element by itself, so that its
            state can be sharded like the weights. Set it for a class that zero does not know.
            Default: true for known classes. Not in DeepSpeed.
        stage3_prefetch_bucket_size: Elements that may be gathered before they are used. 0: none.
            - 0: Nothing is gathered in advance, so each block waits for its parameters.
            - N: At most this many elements are gathered before they are used.
        stage3_param_persistence_threshold: Parameters of at most this many elements stay whole on
            every process.
        stage3_model_persistence_threshold: The most elements that these have together.
        stage3_max_live_parameters: The most elements that are gathered at a time. A block that is
            needed is gathered in any case.
        stage3_max_reuse_distance: Keep a gathered block if it is needed again before this many
            other elements are used. 0: free it after each use.
            - 0: Each block is freed after its use, and gathered again.
            - N: A gathered block is kept if it is needed again before this many other elements
              have been used.
        stage3_gather_16bit_weights_on_model_save: Let `save_model` write the complete model, for
            `from_pretrained`.
            - false: `save_model` does not write the complete weights. `zero consolidate` can
              assemble them from a checkpoint.
        stage3_shard_buffers: Shard large buffers that no forward writes to, such as the weights of
            GPTQ and AWQ. Default: those of quantized layers, if transformers quantized the model.
            Not in DeepSpeed.
            - true: All buffers of at least 2,048 bytes are sharded. A forward that writes to one is
              an error.
            - false: Every process keeps all buffers.
        mics_shard_size: Shard over groups of this many consecutive processes (MiCS), and average
            gradients over the groups. -1 or 0: shard over all.
            - -1: Everything is sharded over all processes.
            - 0: Everything is sharded over all processes.
        zero_hpz_partition_size: Keep a second shard of the 16-bit weights within groups of this
            many consecutive processes (hpZ), for all all-gathers of a step but the first. 0, 1 or
            the number of processes: none.
            - 0: There is no second shard of the weights.
            - 1: There is no second shard of the weights.
        ignore_unused_parameters: Accept parameters without a gradient in a step. `false`: they are
            an error.
            - true: A parameter may have no gradient in a step.
            - false: A parameter without a gradient is an error.
        zero_quantized_weights: Send weights as 8-bit codes when they are gathered. See
            `docs/compression.md`.
        zero_quantized_nontrainable_weights: The same for frozen parameters only. Unlike in
            DeepSpeed, their shards keep their dtype.
        zero_quantized_gradients: Send gradients as codes, and sum them in fp32.
        zero_quantized_gradient_bits: Bits of these codes. Not in DeepSpeed, which always sends 4.
        zero_quantized_moments: Store Adam's and AdamW's moments in 8 bits. See
            `docs/optimizers.md`. Not in DeepSpeed.
        enable_sanity_checks: Raise an error if parameters are changed inside
            `GatheredParameters(modifier_rank=None)`.
    """

    stage: Annotated[int, Field(ge=0, le=3), WHOLE] = key(0, auto="accelerate's zero_stage")
    contiguous_gradients: bool = True
    overlap_comm: bool | None = key(None, validate_default=True)
    reduce_bucket_size: Positive = key(
        int(5e8), auto="the square of the model's hidden size", unit="elements"
    )
    sub_group_size: Annotated[Count, AfterValidator(lambda size: size or sys.maxsize)] = key(
        int(1e9), unit="elements"
    )
    elementwise_optimizer: bool | None = None
    offload_param: OffloadParamConfig | None = key(None, needs=_STAGE_3)
    offload_optimizer: OffloadOptimizerConfig | None = None
    stage3_prefetch_bucket_size: Annotated[Count, BeforeValidator(_floor)] = key(
        int(5e7),
        needs=_STAGE_3,
        auto="0.9 x the square of the model's hidden size",
        unit="elements",
    )
    stage3_param_persistence_threshold: Count = key(
        int(1e5), needs=_STAGE_3, auto="10 x the hidden size", unit="elements"
    )
    stage3_model_persistence_threshold: Count = key(sys.maxsize, needs=_STAGE_3, unit="elements")
    stage3_max_live_parameters: Count = key(int(1e9), needs=_STAGE_3, unit="elements")
    stage3_max_reuse_distance: Count = key(int(1e9), needs=_STAGE_3, unit="elements")
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False, needs=_STAGE_3, auto="accelerate's zero3_save_16bit_model"
    )
    stage3_shard_buffers: bool | None = key(None, needs=_STAGE_3)
    leaf_module: LeafModuleConfig | None = key(None, needs=_STAGE_3)
    mics_shard_size: Annotated[int, Field(ge=-1, le=sys.maxsize), WHOLE] = -1
    zero_hpz_partition_size: Count = key(1, needs=_STAGE_3)
    ignore_unused_parameters: bool = True
    zero_quantized_weights: bool = key(False, needs=_STAGE_3)
    zero_quantized_nontrainable_weights: bool = key(False, needs=_STAGE_3)
    zero_quantized_gradients: bool = False
    zero_quantized_gradient_bits: Annotated[Literal[4, 8], WHOLE] = 8
    zero_quantized_moments: bool = False
    enable_sanity_checks: bool = False

    @field_validator("overlap_comm")
    @classmethod
    def _overlap_by_default_at_stage_3(cls, given: bool | None, info: ValidationInfo) -> bool:
        return info.data.get("stage") == 3 if given is None else given

    def why_idle(self, name: str) -> str | None:
        if self.stage < 3 and self.about(name).get("needs") == _STAGE_3:
            return f"needs stage 3, and this is stage {self.stage}"
        if name == "zero_quantized_gradient_bits" and not self.zero_quantized_gradients:
            return "zero_quantized_gradients is not set"
        return None

    def shards_over(self, world_size: int) -> int:
        """The number of ranks over which a group is sharded.

        Raises UsageError if the world cannot be divided into the groups of `mics_shard_size` or of
        hpZ."""
        mics, secondary = self.mics_shard_size, self.zero_hpz_partition_size
        for name, size in ("mics_shard_size", mics), ("zero_hpz_partition_size", secondary):
            key = f"zero_optimization.{name}"
            require_divisor(key, max(1, size), "the number of processes", world_size)
        if mics > 0 and secondary > 1 and self.stage == 3:
            raise UsageError(
                f"zero_optimization: mics_shard_size (or a mesh) {mics} and "
                f"zero_hpz_partition_size {secondary} are two ways to keep all-gathers within a "
                "group: give one of them"
            )
        return mics if mics > 0 else world_size

    def second_shards_over(self, world_size: int) -> int:
        """The number of ranks over which hpZ keeps a group's second shard, or 0 if there is none.

        Below stage 3 there is none, because every rank has all parameters on its device. If the
        group contains all ranks, the first shard serves the purpose."""
        size = self.zero_hpz_partition_size
        return size if self.stage == 3 and 1 < size < world_size else 0

    @property
    def offloads_params(self) -> bool:
        """Only at stage 3: below it, every rank holds all parameters on its device."""
        section = self.offload_param
        return self.stage == 3 and section is not None and section.device != "none"

    @property
    def offloads_optimizer(self) -> bool:
        """Whether gradients, masters and optimizer state live elsewhere than on the device."""
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"
