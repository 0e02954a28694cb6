"""DeepSpeed's learning-rate schedules, which the section `scheduler` names.

Formulas, parameter names, their order and their defaults are those of
`deepspeed.runtime.lr_schedules` (0.19.8). All are functions of `n`, the number of calls of `step`
so far, minus one: -1 for a schedule just made. Optimizer step 1 uses the rate for -1, optimizer
step 2 that for 0, and so on. Rates do not depend on batch size or number of ranks.

Arguments: `optimizer`, anything with `param_groups`, whose `lr` is set on construction and by every
step (a tensor there is filled in place); the schedule's `parameters`, which
`zero.config.optim.SchedulerParams` checks; `last_batch_iteration`, the `n` to start from. Rates and
momenta are one number, or a list of one for each parameter group. Raises ValueError for a value
that is not allowed, and for a list of another length."""

from __future__ import annotations

import logging
import math
from typing import Any, cast

from zero.config import load_config
from zero.config.optim import SCHEDULE_KEYS, SchedulerConfig, SchedulerParams
from zero.errors import UsageError

logger = logging.getLogger("zero")


# DeepSpeed's constants: names of parameters, each in capitals.
_CONSTANTS = {"lr_schedule", "edge_value", "mid_value"}.union(*SCHEDULE_KEYS.values())
globals().update({name.upper(): name for name in _CONSTANTS})
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"


class Schedule:
    """What all schedules share. A subclass says what the rates are for `n`."""

    def __init__(self, optimizer: Any, *args: Any, **settings: Any):
        kind = next(base.__name__ for base in type(self).__mro__ if base.__name__ in SCHEDULE_KEYS)
        names = SCHEDULE_KEYS[kind]
        if len(args) > len(names) or not settings.keys() <= set(names[len(args) :]):
            raise TypeError(f"{kind}: its arguments are optimizer, {', '.join(names)}")
        settings |= zip(names, args, strict=False)
        config = load_config({"scheduler": {"type": kind, "params": settings}})
        self.optimizer = optimizer
        self.params: SchedulerParams = cast(SchedulerConfig, config.scheduler).params
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        for name, value in settings.items():
            if isinstance(value, list) and len(value) != len(self.base_lrs):
                raise UsageError(
                    f"scheduler.params.{name}: {len(value)} values for {len(self.base_lrs)} "
                    "parameter groups; give one number"
                )
        self._move_to(self.params.last_batch_iteration)

    def __getattr__(self, name: str) -> Any:
        """A setting by its key, such as `warmup_num_steps`."""
        if name == "params" or name not in SchedulerParams.model_fields:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name)
        return getattr(self.params, name)

    def _rates(self, n: int) -> list[float]:
        """The rate of each parameter group."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The current rate of each parameter group, by the formula."""
        return self._rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The rate that each parameter group was last given."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next rate, or to a given one; called after each optimizer step that was not
        skipped.
        """
        following = self.last_batch_iteration + 1
        self._move_to(following if last_batch_iteration is None else last_batch_iteration)

    def state_dict(self) -> dict[str, int]:
        """The position in the schedule; the settings come from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Return to a position, and give the parameter groups its rates."""
        self._move_to(state["last_batch_iteration"])

    def _move_to(self, n: int) -> None:
        self.last_batch_iteration = n
        self._last_lr = self._rates(n)
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _per_group(self, values: float | list[float]) -> list[float]:
        """The values of a setting, one for each parameter group."""
        return values if isinstance(values, list) else [values] * len(self.base_lrs)

    def _between(self, lows: Any, highs: Any, height: float) -> list[float]:
        """The values at a height from 0, the lows, to 1, the highs."""
        pairs = zip(self._per_group(lows), self._per_group(highs), strict=True)
        return [low + (high - low) * height for low, high in pairs]


class WarmupLR(Schedule):
    """Raise the rate from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then hold
    it.

    With n = -1 the rate is `warmup_min_lr`, and with n = 0 again. Fewer than 2 steps count as 2.
    `warmup_max_lr`: by default the `lr` that each group has. `warmup_type`: "log", log(n + 1) /
    log(warmup_num_steps) of the way, or "linear", n / warmup_num_steps."""

    default_max_lr: float | None = None

    @property
    def max_lrs(self) -> list[float]:
        """The rate after the warm-up, of each parameter group."""
        highest = self.params.warmup_max_lr
        if highest is None:
            highest = self.base_lrs if self.default_max_lr is None else self.default_max_lr
        return self._per_group(highest)

    @property
    def min_lrs(self) -> list[float]:
        """The rate before the warm-up, of each parameter group."""
        return self._per_group(self.params.warmup_min_lr)

    def _rates(self, n: int) -> list[float]:
        return self._between(self.min_lrs, self.max_lrs, self._height(n))

    def _height(self, n: int) -> float:
        """Where between the smallest and the largest rate, from 0 to 1."""
        steps = max(2, self.params.warmup_num_steps)
        if n < 0:
            return 0.0
        if n >= steps:
            return self._after_warmup(n - steps, (self.params.total_num_steps or 0) - steps)
        logarithmic = self.params.warmup_type == "log"
        warm = math.log(n + 1) / math.log(steps) if logarithmic else n / steps
        return self.params.warmup_min_ratio + (1.0 - self.params.warmup_min_ratio) * warm

    def _after_warmup(self, done: int, length: int) -> float:
        """The height after `done` of `length` steps that follow the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then down to `warmup_min_lr` in a straight line until `total_num_steps`."""

    default_max_lr = 0.001

    def _after_warmup(self, done: int, length: int) -> float:
        return max(0.0, (length - done) / max(1.0, length))


class WarmupCosineLR(WarmupLR):
    """Scale each group's own `lr`: from `warmup_min_ratio` up to 1, then along a cosine to
    `cos_min_ratio`.

    The cosine ends at step `total_num_steps`; the ratio stays there. With n = -1 the rate is 0.
    """

    def get_lr_ratio(self) -> float:
        """The present ratio, from 0 to 1."""
        return self._height(self.last_batch_iteration)

    def _after_warmup(self, done: int, length: int) -> float:
        cosine = math.cos(math.pi * min(1.0, (done + 1) / max(1, length)))
        lowest = self.params.cos_min_ratio
        return max(0.0, lowest + (1.0 - lowest) * (1.0 + cosine) / 2)


class LRRangeTest(Schedule):
    """Rates that keep rising, to see where training diverges (arXiv 1803.09820).

    The rate is `lr_range_test_min_lr * (1 + lr_range_test_step_rate * (n + 1) /
    lr_range_test_step_size)`; with `lr_range_test_staircase` the quotient is rounded down."""

    def _rates(self, n: int) -> list[float]:
        intervals = (n + 1) / self.params.lr_range_test_step_size
        if self.params.lr_range_test_staircase:
            intervals = math.floor(intervals)
        factor = 1 + self.params.lr_range_test_step_rate * intervals
        return [rate * factor for rate in self._per_group(self.params.lr_range_test_min_lr)]


class OneCycle(Schedule):
    """One cycle of the rate, and of the momentum in the other direction, then decay (arXiv
    1803.09820).

    The rate rises from `cycle_min_lr` to `cycle_max_lr` in `cycle_first_step_size` steps, and falls
    back in `cycle_second_step_size` steps (by default as many). It follows straight lines, or
    stairs if their number is not 0. After the cycle the rate is divided by `1 + decay_lr_rate *
    steps / decay_step_size`, if `decay_step_size` is not 0. The momentum is multiplied by the same
    with `decay_mom_rate`. The momentum is the first of the optimizer's `betas`; the second becomes
    0.99. With `cycle_momentum=False`, or if the optimizer has no `betas`, both stay."""

    def __init__(self, optimizer: Any, *args: Any, **settings: Any):
        self._has_betas = all("betas" in group for group in optimizer.param_groups)
        super().__init__(optimizer, *args, **settings)
        if self.params.cycle_momentum and not self._has_betas:
            kind = type(optimizer).__name__
            logger.warning("cycle_momentum has no effect: %s has no betas", kind)

    def _rates(self, n: int) -> list[float]:
        params = self.params
        decay = self._decay(n, params.decay_lr_rate)
        lows = [low / decay for low in self._per_group(params.cycle_min_lr or 0.0)]
        return self._between(lows, params.cycle_max_lr, self._height(n))

    def get_mom(self) -> list[tuple[float, float]] | None:
        """`betas` of each parameter group by the formula, None if the momentum is left alone."""
        params, n = self.params, self.last_batch_iteration
        if not (params.cycle_momentum and self._has_betas):
            return None
        decay = self._decay(n, params.decay_mom_rate)
        highs = [high * decay for high in self._per_group(params.cycle_max_mom)]
        return [(mom, 0.99) for mom in self._between(highs, params.cycle_min_mom, self._height(n))]

    def _stages(self) -> tuple[int, int]:
        """The steps of the rise, and of the fall."""
        rise, fall = self.params.cycle_first_step_size, self.params.cycle_second_step_size
        return rise, rise if fall is None else fall

    def _height(self, n: int) -> float:
        """Where in the cycle, from 0 at its ends and after it to 1 at the peak."""
        rise, fall = self._stages()
        done = n + 1 if n + 1 < rise + fall else 0
        size, stairs = rise, self.params.cycle_first_stair_count
        if done > rise:
            done, size = rise + fall - done, fall
            if self.params.cycle_second_stair_count is not None:
                stairs = self.params.cycle_second_stair_count
        return math.floor(done * stairs / size) / stairs if stairs > 0 else done / size

    def _decay(self, n: int, rate: float) -> float:
        late, interval = n + 1 - sum(self._stages()), self.params.decay_step_size
        return 1 + rate * late / interval if interval and late > 0 else 1.0

    def _move_to(self, n: int) -> None:
        super()._move_to(n)
        betas = self.get_mom()
        if betas is not None:
            # The first optimizer step has the smallest momentum, against the formula: DeepSpeed
            # begins so.
            if n < 0:
                betas = [(mom, 0.99) for mom in self._per_group(self.params.cycle_min_mom)]
            for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = pair


VALID_LR_SCHEDULES = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build_scheduler(scheduler: SchedulerConfig, optimizer: Any) -> Schedule:
    """The schedule that the configuration names; its type and parameters are checked on reading."""
    return VALID_LR_SCHEDULES[scheduler.type](optimizer, **scheduler.params)
