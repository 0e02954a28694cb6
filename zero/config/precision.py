"""The sections ``fp16``, ``bf16`` and ``data_types``: the dtypes used in training."""

from collections.abc import Iterator

from zero.config.idle import with_idle_keys
from zero.config.keys import Count, DType, NonNegative, Section, key


class SixteenBit(Section):
    """What the sections of the two 16-bit dtypes have in common."""

    enabled: bool = False

    def why_idle(self, name: str) -> str | None:
        return None if self.enabled or name == "enabled" else "the section is not enabled"


@with_idle_keys("fp16")
class FP16Config(SixteenBit):
    """Training in float16. The other keys have an effect only if `enabled` is true. Otherwise only
    their types and signs are checked.

    The loss is multiplied by a scale, because small gradients would become 0 in float16. A dynamic
    scale is halved when gradients overflow, and doubled after a number of good steps. If gradients
    overflow even at the smallest scale, the run ends and names the parameter.

    Attributes:
        enabled: Compute in float16, with fp32 masters and moments.
        loss_scale: 0: a dynamic scale, with the keys below. Any other number: a fixed one.
            - 0: The loss is multiplied by a scale that falls when gradients overflow and rises
              after a number of steps without overflow.
            - N: The loss is always multiplied by N. The other keys for the scale have no effect.
        initial_scale_power: The first scale is 2 to the power of this number.
        loss_scale_window: Steps without overflow after which the scale is doubled.
            - N: After N steps without overflow the scale is doubled.
        hysteresis: Overflows after which the scale is halved. From then on each one halves it,
            until it is doubled. Default at stage 0: 1.
            - 1: Each overflow halves the scale.
            - N: From the Nth overflow on, each one halves the scale. The count is reset when the
              scale is doubled.
        consecutive_hysteresis: Count only consecutive overflows.
        min_loss_scale: The smallest scale.
            - N: The scale is never below N. An overflow there ends the run.
    """

    enabled: bool = key(False, auto="fp16")
    loss_scale: NonNegative = 0.0
    initial_scale_power: Count = key(16, unit="power of 2")
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Count = 1

    def impossible(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for settings of the scale with which nothing could be trained.

        DeepSpeed configurations in which fp16 is off, or the scale is fixed, may contain them.
        """
        initial = self.initial_scale_power
        if self.loss_scale:
            return  # a fixed scale
        for name in ("loss_scale_window", "hysteresis", "min_loss_scale"):
            if getattr(self, name) == 0:
                yield name, "expected a number greater than 0, got 0"
        if initial > 127:
            # The scale is kept in fp32.
            yield "initial_scale_power", f"expected a number of at most 127, got {initial}"
        elif self.min_loss_scale > 2**initial:
            message = f"{self.min_loss_scale} is above 2 ** initial_scale_power = {2**initial}"
            yield "min_loss_scale", message

    def why_idle(self, name: str) -> str | None:
        if self.loss_scale and name not in ("enabled", "loss_scale"):
            return "the scale is fixed by loss_scale"
        return super().why_idle(name)


@with_idle_keys("bf16")
class BF16Config(SixteenBit):
    """Training in bfloat16. The other keys have an effect only if `enabled` is true.

    Attributes:
        enabled: Compute in bfloat16, by default with fp32 master weights.
        check_grad_overflow: Skip a step if its gradients are not finite.
            - true: A step whose gradients are not finite is skipped.
            - false: A step is taken even if its gradients are not finite.
        bf16_master_weights_and_grads: Keep no fp32 masters, sum gradients in bf16, and round
            updates stochastically. See `docs/optimizers.md`.
        bf16_optimizer_states: Keep the moments in bf16 too. Needs `bf16_master_weights_and_grads`
            and an element-wise optimizer.
        rounding_seed: The seed of the stochastic rounding. Not in DeepSpeed.
    """

    enabled: bool = key(False, auto="bf16")
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False
    rounding_seed: Count = 0

    def why_idle(self, name: str) -> str | None:
        rounds = name in ("bf16_optimizer_states", "rounding_seed")
        if rounds and not self.bf16_master_weights_and_grads:
            return "masters and moments are fp32 without bf16_master_weights_and_grads"
        return super().why_idle(name)

    @property
    def without_masters(self) -> bool:
        """Whether the weights in bf16 are the only ones."""
        return self.enabled and self.bf16_master_weights_and_grads


@with_idle_keys("data_types")
class DataTypesConfig(Section):
    """Dtypes of gradients and buffers.

    Attributes:
        grad_accum_dtype: The dtype in which gradients are summed over micro-batches and kept until
            the step. Default: fp32; 16-bit gradients to which nothing is added stay in 16 bits.
        buffer_dtype: The dtype of floating-point buffers. Default: unchanged.
    """

    grad_accum_dtype: DType = None
    buffer_dtype: DType = None
