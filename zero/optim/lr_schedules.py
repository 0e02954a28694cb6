"""Learning-rate schedules named by the ``scheduler`` section: WarmupLR and WarmupDecayLR.

Formulas and parameter names are those of ``deepspeed.runtime.lr_schedules`` (0.19.8). With ``n`` the number of calls of
:meth:`WarmupLR.step` so far, minus one, the rate of every parameter group is

    min + (max - min) * gamma(n),    n = -1 (just made): min

so optimizer step 1 uses ``min``, and so does step 2, where ``gamma(0)`` is 0 for both kinds of warm-up.
"""

import math
from typing import Any

from zero.config import SchedulerConfig


class WarmupLR:
    """Raise the rate from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps`` steps, then hold it.

    Args:
        optimizer: anything with ``param_groups``; their ``lr`` is set on construction and by every step.
        warmup_min_lr: rate at the start, one number or one for each parameter group.
        warmup_max_lr: rate after the warm-up, likewise; by default the ``lr`` that each group has.
        warmup_num_steps: length of the warm-up; fewer than 2 act as 2.
        warmup_type: "log", gamma(n) = log(n + 1) / log(warmup_num_steps), or "linear", n / warmup_num_steps.
        last_batch_iteration: the ``n`` to start from.

    Raises:
        ValueError: a list of rates does not have one number for each parameter group.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.optimizer = optimizer
        if warmup_max_lr is None:
            warmup_max_lr = [group["lr"] for group in optimizer.param_groups]
        self.min_lrs = self._one_per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._one_per_group("warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        self._move_to(last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next rate, or to a given one; called after each optimizer step that was not skipped."""
        self._move_to(self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The rate of each parameter group by the formula."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        gamma = self._gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_last_lr(self) -> list[float]:
        """The rate that each parameter group was last given."""
        return self._last_lr

    def state_dict(self) -> dict[str, int]:
        """The position in the schedule; the settings come from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Return to a position, and give the parameter groups its rates."""
        self._move_to(state["last_batch_iteration"])

    def _move_to(self, iteration: int) -> None:
        self.last_batch_iteration = iteration
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate

    def _gamma(self) -> float:
        if self.last_batch_iteration >= self.warmup_num_steps:
            return self._gamma_after_warmup()
        if self.warmup_type == "log":
            return math.log(self.last_batch_iteration + 1) / math.log(self.warmup_num_steps)
        return self.last_batch_iteration / self.warmup_num_steps

    def _gamma_after_warmup(self) -> float:
        return 1.0

    def _one_per_group(self, name: str, rates: float | list[float]) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(rates, list | tuple):
            return [rates] * groups
        if len(rates) != groups:
            raise ValueError(
                f"scheduler.params.{name}: {len(rates)} rates for {groups} parameter groups; give one number"
            )
        return list(rates)


class WarmupDecayLR(WarmupLR):
    """As :class:`WarmupLR`, then down to ``warmup_min_lr`` in a straight line until step ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gamma_after_warmup(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


VALID_LR_SCHEDULES = {"WarmupLR": WarmupLR, "WarmupDecayLR": WarmupDecayLR}


def build_scheduler(scheduler: SchedulerConfig | None, optimizer: Any) -> WarmupLR | None:
    """The schedule that the configuration names (its type and parameters are checked on reading), None without one."""
    if scheduler is None:
        return None
    return VALID_LR_SCHEDULES[scheduler.type](optimizer, **scheduler.params)
