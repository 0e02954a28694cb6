"""Loss scaling for float16: the scale, and how it reacts to overflows. Pure Python, equal on all
ranks.

The rules are those of DeepSpeed 0.19.8 (``runtime/fp16/loss_scaler.py``). The caller multiplies the
loss by :attr:`LossScaler.scale` and finds out whether any rank's gradient is not finite. If so, it
skips the optimizer step, or ends the run if the scaler is :attr:`~LossScaler.exhausted`. It calls
:meth:`LossScaler.update` once for each step."""

from dataclasses import dataclass, fields
from typing import Any

from zero.config import FP16Config

_FACTOR = 2.0
_COUNTED = ("scale", "overflows_left", "steps", "last_overflow")


@dataclass(eq=False)
class LossScaler:
    """A static loss scale, or a dynamic one that halves on overflow and doubles after a stable
    window.

    Args:
        loss_scale: the static scale; 0 for a dynamic one, and only then do the other arguments
            matter.
        initial_scale_power: the first scale is ``2 ** initial_scale_power``.
        loss_scale_window: number of steps without overflow after which the scale doubles.
        hysteresis: number of overflows it takes to halve the scale; the count is refilled when the
            scale doubles.
        consecutive_hysteresis: refill the count after every step without overflow.
        min_loss_scale: the scale never falls below this.
    """

    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1

    def __post_init__(self) -> None:
        self.dynamic = self.loss_scale == 0
        self.scale = _FACTOR**self.initial_scale_power if self.dynamic else float(self.loss_scale)
        self.overflows_left = self.hysteresis
        self.steps = 0
        self.last_overflow = -1

    @classmethod
    def from_config(cls, fp16: FP16Config) -> "LossScaler":
        """The scaler that an ``fp16`` section describes."""
        return cls(**{field.name: getattr(fp16, field.name) for field in fields(cls)})

    @property
    def at_minimum(self) -> bool:
        """True if a dynamic scale cannot fall further."""
        return self.dynamic and self.scale <= self.min_loss_scale

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
                self.scale = max(self.scale / _FACTOR, self.min_loss_scale)
            else:
                self.overflows_left -= 1
            self.last_overflow = self.steps
        else:
            stable = self.steps - self.last_overflow - 1
            doubles = stable > 0 and stable % self.loss_scale_window == 0
            if doubles:
                self.scale *= _FACTOR
            if doubles or self.consecutive_hysteresis:
                self.overflows_left = self.hysteresis
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """What changes from step to step; the settings come from the configuration."""
        return {name: getattr(self, name) for name in _COUNTED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        for name in _COUNTED:
            setattr(self, name, state[name])
