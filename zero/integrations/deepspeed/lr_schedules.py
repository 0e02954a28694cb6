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
from typing import Any

from zero.config.optim import REQUIRED, SchedulerConfig, SchedulerParams
from zero.errors import UsageError

logger = logging.getLogger("zero")


class Schedule:
    """What all schedules share. A subclass says what the rates are for `n`."""

    parameters: tuple[str, ...] = ()

    def __init__(self, optimizer: Any, *args: Any, **settings: Any):
        kind, names = type(self).__name__, (*self.parameters, "last_batch_iteration")
        if len(args) > len(names) or not settings.keys() <= set(names[len(args) :]):
            raise TypeError(f"{kind}: its arguments are optimizer, {', '.join(names)}")
        settings |= zip(names, args, strict=False)
        if missing := [name for name in REQUIRED.get(kind, ()) if settings.get(name) is None]:
            raise UsageError(f"scheduler.params.{missing[0]}: is required by {kind}")
        self.optimizer = optimizer
        self.params = SchedulerParams(**settings)
        self._prepare()
        self._move_to(self.params.last_batch_iteration)

    def _prepare(self) -> None:
        """Derive what the formulas need from `self.params`."""
        raise NotImplementedError

    def _rates(self, n: int) -> list[float]:
        """The rate of each parameter group."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The present rate of each parameter group by the formula."""
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

    def _per_group(self, name: str) -> list[float]:
        """The values of a setting, one for each parameter group."""
        values, groups = getattr(self.params, name), len(self.optimizer.param_groups)
        values = list(values) if isinstance(values, list | tuple) else [values] * groups
        if len(values) == groups:
            return values
        raise UsageError(
            f"scheduler.params.{name}: {len(values)} values for {groups} parameter groups; give "
            "one number"
        )


def _between(lows: list[float], highs: list[float], height: float) -> list[float]:
    """The values at a height from 0, the lows, to 1, the highs."""
    return [low + (high - low) * height for low, high in zip(lows, highs, strict=True)]


class WarmupLR(Schedule):
    """Raise the rate from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then hold
    it.

    With n = -1 the rate is `warmup_min_lr`, and with n = 0 again. Fewer than 2 steps act as 2.
    `warmup_max_lr`: by default the `lr` that each group has. `warmup_type`: "log", log(n + 1) /
    log(warmup_num_steps) of the way, or "linear", n / warmup_num_steps."""

    parameters = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
    default_max_lr: float | None = None

    def _prepare(self) -> None:
        self._steps = max(2, self.params.warmup_num_steps)
        self._total = self.params.total_num_steps or 0
        self.min_lrs = self._per_group("warmup_min_lr")
        if self.params.warmup_max_lr is not None:
            self.max_lrs = self._per_group("warmup_max_lr")
        else:
            own = [float(group["lr"]) for group in self.optimizer.param_groups]
            self.max_lrs = own if self.default_max_lr is None else [self.default_max_lr] * len(own)

    def _rates(self, n: int) -> list[float]:
        return _between(self.min_lrs, self.max_lrs, self._height(n))

    def _height(self, n: int) -> float:
        """Where between the smallest and the largest rate, from 0 to 1."""
        if n < 0:
            return 0.0
        if n >= self._steps:
            return self._after_warmup(n)
        logarithmic = self.params.warmup_type == "log"
        warm = math.log(n + 1) / math.log(self._steps) if logarithmic else n / self._steps
        return self.params.warmup_min_ratio + (1.0 - self.params.warmup_min_ratio) * warm

    def _after_warmup(self, n: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then down to `warmup_min_lr` in a straight line until `total_num_steps`."""

    parameters = ("total_num_steps", *WarmupLR.parameters)
    default_max_lr = 0.001

    def _after_warmup(self, n: int) -> float:
        return max(0.0, (self._total - n) / max(1.0, self._total - self._steps))


class WarmupCosineLR(WarmupLR):
    """Scale each group's own `lr`: from `warmup_min_ratio` up to 1, then along a cosine to
    `cos_min_ratio`.

    The cosine ends at step `total_num_steps`; the ratio stays there. With n = -1 the rate is 0.
    """

    parameters = (
        "total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
    )  # fmt: skip

    def _after_warmup(self, n: int) -> float:
        length = max(1, self._total - self._steps)
        cosine = math.cos(math.pi * min(1.0, (n - self._steps + 1) / length))
        lowest = self.params.cos_min_ratio
        return max(0.0, lowest + (1.0 - lowest) * (1.0 + cosine) / 2)


class LRRangeTest(Schedule):
    """Rates that rise all the time, to see where training diverges (arXiv 1803.09820).

    The rate is `lr_range_test_min_lr * (1 + lr_range_test_step_rate * (n + 1) /
    lr_range_test_step_size)`; with `lr_range_test_staircase` the quotient is rounded down."""

    parameters = (
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
        "lr_range_test_staircase",
    )  # fmt: skip

    def _prepare(self) -> None:
        self.min_lrs = self._per_group("lr_range_test_min_lr")

    def _rates(self, n: int) -> list[float]:
        intervals = (n + 1) / self.params.lr_range_test_step_size
        if self.params.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return [
            rate * (1 + self.params.lr_range_test_step_rate * intervals) for rate in self.min_lrs
        ]


class OneCycle(Schedule):
    """One cycle of the rate, and of the momentum in the other direction, then decay (arXiv
    1803.09820).

    The rate rises from `cycle_min_lr` to `cycle_max_lr` in `cycle_first_step_size` steps, and falls
    back in `cycle_second_step_size` steps (by default as many). It follows straight lines, or
    stairs if their number is not 0. After the cycle the rate is divided by `1 + decay_lr_rate *
    steps / decay_step_size`, if `decay_step_size` is not 0. The momentum is multiplied by the same
    with `decay_mom_rate`. The momentum is the first of the optimizer's `betas`; the second becomes
    0.99. With `cycle_momentum=False`, or if the optimizer has no `betas`, both stay."""

    parameters = (
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size",
        "cycle_second_step_size", "cycle_first_stair_count", "cycle_second_stair_count",
        "decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate",
    )  # fmt: skip

    def _prepare(self) -> None:
        params = self.params
        self._rise = params.cycle_first_step_size
        self._rise_stairs = params.cycle_first_stair_count
        fall, stairs = params.cycle_second_step_size, params.cycle_second_stair_count
        self._fall = self._rise if fall is None else fall
        self._fall_stairs = self._rise_stairs if stairs is None else stairs
        self._length = self._rise + self._fall
        self.min_lrs = self._per_group("cycle_min_lr")
        self.max_lrs = self._per_group("cycle_max_lr")
        self.min_moms = self._per_group("cycle_min_mom")
        self.max_moms = self._per_group("cycle_max_mom")
        has_betas = all("betas" in group for group in self.optimizer.param_groups)
        self._moves_momentum = params.cycle_momentum and has_betas
        if params.cycle_momentum and not has_betas:
            kind = type(self.optimizer).__name__
            logger.warning("cycle_momentum has no effect: %s has no betas", kind)

    def _rates(self, n: int) -> list[float]:
        if n < self._length:
            return _between(self.min_lrs, self.max_lrs, self._height(n))
        return [low / self._decay(n, self.params.decay_lr_rate) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """`betas` of each parameter group by the formula, None if the momentum is left alone."""
        return self._betas(self.last_batch_iteration) if self._moves_momentum else None

    def _betas(self, n: int) -> list[tuple[float, float]]:
        if n < self._length:
            moms = _between(self.max_moms, self.min_moms, self._height(n))
        else:
            moms = [high * self._decay(n, self.params.decay_mom_rate) for high in self.max_moms]
        return [(mom, 0.99) for mom in moms]

    def _height(self, n: int) -> float:
        """Where in the cycle, from 0 at its ends to 1 at the peak."""
        done, size, stairs = (n + 1) % self._length, self._rise, self._rise_stairs
        if done > self._rise:
            done, size, stairs = self._length - done, self._fall, self._fall_stairs
        return math.floor(done * stairs / size) / stairs if stairs > 0 else done / size

    def _decay(self, n: int, rate: float) -> float:
        interval = self.params.decay_step_size
        return 1 + rate * (n - self._length + 1) / interval if interval else 1.0

    def _move_to(self, n: int) -> None:
        super()._move_to(n)
        if self._moves_momentum:
            # The first optimizer step has the smallest momentum, against the formula: DeepSpeed
            # begins so.
            betas = [(mom, 0.99) for mom in self.min_moms] if n < 0 else self._betas(n)
            for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = pair


VALID_LR_SCHEDULES = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build_scheduler(scheduler: SchedulerConfig, optimizer: Any) -> Schedule:
    """The schedule that the configuration names; its type and parameters are checked on reading."""
    return VALID_LR_SCHEDULES[scheduler.type](optimizer, **scheduler.params)
