"""Loss scaling for float16: the scale, and how it reacts to overflows. Pure Python, equal on all
ranks.

The rules are those of DeepSpeed 0.19.8 (``runtime/fp16/loss_scaler.py``). The caller multiplies the
loss by :attr:`LossScaler.scale` and finds out whether any rank's gradient is not finite. If so, it
skips the optimizer step, or ends the run if the scaler is :attr:`~LossScaler.exhausted`. It calls
:meth:`LossScaler.update` once for each step."""

from typing import Any

from zero.config import FP16Config

_FACTOR = 2.0
_COUNTED = ("scale", "overflows_left", "steps", "last_overflow")


class LossScaler:
    """The loss scale of an ``fp16`` section: a static one, or a dynamic one that halves on overflow
    and doubles after a stable window. The section's class has what its keys mean.
    """

    def __init__(self, fp16: FP16Config):
        self.fp16 = fp16
        self.dynamic = fp16.loss_scale == 0
        self.scale = _FACTOR**fp16.initial_scale_power if self.dynamic else float(fp16.loss_scale)
        self.overflows_left = fp16.hysteresis
        self.steps = 0
        self.last_overflow = -1

    @property
    def at_minimum(self) -> bool:
        """True if a dynamic scale cannot fall further."""
        return self.dynamic and self.scale <= self.fp16.min_loss_scale

    @property
    def exhausted(self) -> bool:
        """True if another overflow would leave nothing to try: the minimum is reached and the
        hysteresis is used up.
        """
        return self.at_minimum and self.overflows_left == 1

    def update(self, overflow: bool) -> None:
        """Count one optimizer step.

        `overflow`: it was skipped, because a gradient is not finite.
        """
        if not self.dynamic:
            return
        if overflow:
            if self.overflows_left == 1:
                self.scale = max(self.scale / _FACTOR, self.fp16.min_loss_scale)
            else:
                self.overflows_left -= 1
            self.last_overflow = self.steps
        else:
            stable = self.steps - self.last_overflow - 1
            doubles = stable > 0 and stable % self.fp16.loss_scale_window == 0
            if doubles:
                self.scale *= _FACTOR
            if doubles or self.fp16.consecutive_hysteresis:
                self.overflows_left = self.fp16.hysteresis
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """What changes from step to step; the settings come from the configuration."""
        return {name: getattr(self, name) for name in _COUNTED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        for name in _COUNTED:
            setattr(self, name, state[name])
