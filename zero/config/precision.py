"""The sections ``fp16``, ``bf16`` and ``data_types``: the dtypes of training."""

from zero.config.keys import DType, NonNegative, Positive, Section, acts, integer, unused


class _SixteenBit(Section):
    def why_idle(self, key: str) -> str | None:
        return (
            super().why_idle(key)
            if self.enabled or key == "enabled"
            else "the section is not enabled"
        )


class FP16Config(_SixteenBit):
    """Training in float16. The keys act if `enabled` is true.

    The loss is multiplied by a scale. A dynamic scale halves at overflows and doubles after good
    steps. If an overflow happens at the smallest scale, the run ends and names the parameter."""

    enabled: bool = acts(
        False, "Parameters and compute are float16. Masters and moments are fp32.", auto="fp16"
    )
    auto_cast: bool = unused(False, "inputs keep the dtype that the script gives them")
    loss_scale: NonNegative = acts(
        0.0,
        "0: a dynamic scale. Another number: a fixed scale; the keys below do not act.",
        says={
            0: "The loss is multiplied by a scale that falls at overflows and rises after good "
            "steps.",
            "other": "The loss is always multiplied by {}. The other keys of the scale do not act.",
        },
    )
    # The scale is kept in fp32, whose largest power of two this is.
    initial_scale_power: integer(0, 127) = acts(
        16, "The first scale is 2 to this power.", unit="power of 2"
    )
    loss_scale_window: Positive = acts(
        1000,
        "Steps without overflow after which the scale doubles.",
        says={"other": "After {} steps without overflow the scale doubles."},
    )
    hysteresis: Positive = acts(
        2,
        says={
            1: "Each overflow halves the scale.",
            "other": "From overflow number {} on, each one halves the scale. The count starts anew "
            "when it doubles.",
        },
    )
    """Overflows that halve the scale. The count starts again when the scale doubles. Default at stage 0: 1."""
    consecutive_hysteresis: bool = acts(
        False, "true: the count of overflows starts again after each good step."
    )
    min_loss_scale: Positive = acts(
        1,
        "The smallest scale.",
        says={"other": "The scale is never below {}. An overflow there ends the run."},
    )
    fp16_master_weights_and_grads: bool = unused(False, "masters and moments are always fp32")

    def why_idle(self, key: str) -> str | None:
        if self.loss_scale and key not in ("enabled", "loss_scale"):
            return "the scale is fixed by loss_scale"
        return super().why_idle(key)


class BF16Config(_SixteenBit):
    """Training in bfloat16. The keys act if `enabled` is true."""

    enabled: bool = acts(False, "Parameters and compute are bfloat16.", auto="bf16")
    immediate_grad_update: bool = unused(
        False, "gradients are always reduced as soon as a group's backward is done"
    )
    check_grad_overflow: bool = acts(
        True,
        "false: a step is taken even if its gradients are not finite.",
        says={
            True: "A step whose gradients are not finite is skipped.",
            False: "A step is taken even if its gradients are not finite.",
        },
    )
    bf16_master_weights_and_grads: bool = False
    """No fp32 masters: updates are rounded to bf16, up or down at random. Gradients are added in bf16."""
    bf16_optimizer_states: bool = acts(
        False, "Without masters: moments are bf16, too. For element-wise optimizers."
    )
    rounding_seed: integer(0) = acts(0, "Seed of that rounding.")

    def why_idle(self, key: str) -> str | None:
        if (
            key in ("bf16_optimizer_states", "rounding_seed")
            and not self.bf16_master_weights_and_grads
        ):
            return "masters and moments are fp32 without bf16_master_weights_and_grads"
        return super().why_idle(key)

    @property
    def without_masters(self) -> bool:
        return self.enabled and self.bf16_master_weights_and_grads


class DataTypesConfig(Section):
    """Dtypes of what is neither a parameter nor an optimizer state."""

    grad_accum_dtype: DType = None
    """Gradients are summed over micro-batches, and kept for the step, in this dtype.

    Default: fp32; and 16 bits for a 16-bit gradient to which nothing is added.
    """
    param_dtype: DType = unused(None, "parameters follow the fp16 and bf16 sections")
    buffer_dtype: DType = unused(None, "buffers keep the dtype they are loaded with")
    keep_in_fp32_modules: list[str] | str = unused(
        "auto", "every parameter has the dtype of the fp16 or bf16 section"
    )
