"""Learning-rate schedules named by the ``scheduler`` section.

Formulas, parameter names and defaults are those of ``deepspeed.runtime.lr_schedules`` (0.19.8). All are functions of
``n``, the number of calls of ``step`` so far, minus one: -1 for a schedule just made. Optimizer step 1 uses the rate
for -1, optimizer step 2 that for 0, and so on. Rates do not depend on batch size or number of ranks.

Arguments that are common to all: ``optimizer``, anything with ``param_groups``, whose ``lr`` is set on construction and
by every step (a tensor there is filled in place); ``last_batch_iteration``, the ``n`` to start from. Rates and momenta
are one number or a list of one for each parameter group. Raises ValueError for a list of another length and for a
number of steps that is too small.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

from zero.config.optim import SchedulerConfig

logger = logging.getLogger("zero")

Rates = float | list[float]

# What DeepSpeed's module calls the schedules and their parameters.
# fmt: off
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS = "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"
WARMUP_TYPE, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "warmup_type", "log", "linear"
TOTAL_NUM_STEPS, WARMUP_MIN_RATIO, COS_MIN_RATIO = "total_num_steps", "warmup_min_ratio", "cos_min_ratio"
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"
CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE = "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"
CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE = "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"
CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT = "cycle_first_step_size", "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT = "cycle_second_step_size", "cycle_second_stair_count"
CYCLE_MOMENTUM, DECAY_STEP_SIZE = "cycle_momentum", "decay_step_size"
# fmt: on


class Schedule:
    """What all schedules share; they are dataclasses of their settings."""

    optimizer: Any
    last_batch_iteration: int
    min_lrs: list[float]
    max_lrs: list[float]

    def __post_init__(self) -> None:
        self._move_to(self.last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The rate of each parameter group by the formula."""
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _height(self) -> float:
        """Where between the smallest and the largest rate, from 0 to 1."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rate that each parameter group was last given."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next rate, or to a given one; called after each optimizer step that was not skipped."""
        self._move_to(self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration)

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
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _per_group(self, name: str) -> list[float]:
        """The values of a setting, one for each parameter group."""
        values, groups = getattr(self, name), len(self.optimizer.param_groups)
        values = list(values) if isinstance(values, list | tuple) else [values] * groups
        if len(values) != groups:
            found = f"{len(values)} values for {groups} parameter groups; give one number"
            raise ValueError(f"scheduler.params.{name}: {found}")
        return values

    def _check_steps(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or value < minimum:
            wanted = f"expected a number of steps of at least {minimum}, got {value!r}"
            raise ValueError(f"scheduler.params.{name}: {wanted}")


class _Warmup(Schedule):
    """Up in ``warmup_num_steps`` steps, of which fewer than 2 act as 2; at the bottom with n = -1."""

    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    warmup_min_ratio: float = 0.0

    def __post_init__(self) -> None:
        self._check_steps("warmup_num_steps", 0)
        self.warmup_num_steps = max(2, self.warmup_num_steps)
        if self.warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            logger.warning("warmup_type %r is neither 'log' nor 'linear'; 'log' is used", self.warmup_type)
            self.warmup_type = WARMUP_LOG_RATE
        if self.warmup_max_lr is None:
            self.warmup_max_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs, self.max_lrs = self._per_group("warmup_min_lr"), self._per_group("warmup_max_lr")
        super().__post_init__()

    def _height(self) -> float:
        n, steps = self.last_batch_iteration, self.warmup_num_steps
        if n < 0:
            return 0.0
        if n >= steps:
            return self._after_warmup(n)
        warm = math.log(n + 1) / math.log(steps) if self.warmup_type == WARMUP_LOG_RATE else n / steps
        return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * warm

    def _after_warmup(self, n: int) -> float:
        return 1.0


@dataclass(eq=False, repr=False)
class WarmupLR(_Warmup):
    """Raise the rate from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps`` steps, then hold it.

    With n = -1 the rate is ``warmup_min_lr``, and with n = 0 again. ``warmup_max_lr``: by default the ``lr`` that each
    group has. ``warmup_type``: "log", log(n + 1) / log(warmup_num_steps) of the way, or "linear", n / warmup_num_steps.
    """

    optimizer: Any
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = WARMUP_LOG_RATE
    last_batch_iteration: int = -1


@dataclass(eq=False, repr=False)
class WarmupDecayLR(_Warmup):
    """As :class:`WarmupLR`, then down to ``warmup_min_lr`` in a straight line until step ``total_num_steps``."""

    optimizer: Any
    total_num_steps: int
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = WARMUP_LOG_RATE
    last_batch_iteration: int = -1

    def _after_warmup(self, n: int) -> float:
        return max(0.0, (self.total_num_steps - n) / max(1.0, self.total_num_steps - self.warmup_num_steps))


@dataclass(eq=False, repr=False)
class WarmupCosineLR(_Warmup):
    """Scale each group's own ``lr``: from ``warmup_min_ratio`` up to 1, then along a cosine to ``cos_min_ratio``.

    The cosine ends at step ``total_num_steps``; the ratio stays there. With n = -1 the rate is 0.
    """

    optimizer: Any
    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = WARMUP_LOG_RATE
    last_batch_iteration: int = -1

    def get_lr_ratio(self) -> float:
        """The present factor on the groups' own rates."""
        return self._height()

    def _after_warmup(self, n: int) -> float:
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        cosine = math.cos(math.pi * min(1.0, (n - self.warmup_num_steps + 1) / length))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + cosine) / 2)


@dataclass(eq=False, repr=False)
class LRRangeTest(Schedule):
    """Rates that rise without end, to see where training diverges (arXiv 1803.09820).

    The rate is ``lr_range_test_min_lr * (1 + lr_range_test_step_rate * (n + 1) / lr_range_test_step_size)``; with
    ``lr_range_test_staircase`` the quotient is rounded down.
    """

    optimizer: Any
    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1

    def __post_init__(self) -> None:
        self._check_steps("lr_range_test_step_size", 1)
        self.min_lrs = self._per_group("lr_range_test_min_lr")
        super().__post_init__()

    def get_lr(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return [rate * (1 + self.lr_range_test_step_rate * intervals) for rate in self.min_lrs]


@dataclass(eq=False, repr=False)
class OneCycle(Schedule):
    """One cycle of the rate, and of the momentum the other way round, then decay (arXiv 1803.09820).

    The rate goes in straight lines from ``cycle_min_lr`` to ``cycle_max_lr`` and back, in ``cycle_first_step_size``
    steps up and ``cycle_second_step_size`` down, by default as many; or in stairs where their number is not 0.
    Afterwards it is divided by ``1 + decay_lr_rate * steps / decay_step_size`` (if that is not 0), and the momentum
    multiplied by the same with ``decay_mom_rate``. Momentum is the first of the optimizer's ``betas``; the second
    becomes 0.99. ``cycle_momentum=False``, or an optimizer without ``betas``: both are left alone.
    """

    optimizer: Any
    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1

    def __post_init__(self) -> None:
        if self.cycle_second_step_size is None:
            self.cycle_second_step_size = self.cycle_first_step_size
        if self.cycle_second_stair_count is None:
            self.cycle_second_stair_count = self.cycle_first_stair_count
        self._check_steps("cycle_first_step_size", 1)
        self._check_steps("cycle_second_step_size", 0)
        self.total_size = self.cycle_first_step_size + self.cycle_second_step_size
        self.step_ratio = self.cycle_first_step_size / self.total_size  # read by scripts
        self.min_lrs, self.max_lrs = self._per_group("cycle_min_lr"), self._per_group("cycle_max_lr")
        self.min_moms, self.max_moms = self._per_group("cycle_min_mom"), self._per_group("cycle_max_mom")
        if self.cycle_momentum and not all("betas" in group for group in self.optimizer.param_groups):
            logger.warning("cycle_momentum has no effect: %s has no betas", type(self.optimizer).__name__)
            self.cycle_momentum = False
        super().__post_init__()

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            return super().get_lr()
        return [low / self._decay(self.decay_lr_rate) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """``betas`` of each parameter group by the formula, None if the momentum is left alone."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            moms = [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        else:
            moms = [high * self._decay(self.decay_mom_rate) for high in self.max_moms]
        return [(mom, 0.99) for mom in moms]

    def _height(self) -> float:
        """Where in the cycle, from 0 at its ends to 1 at the peak."""
        position = (self.last_batch_iteration + 1) % self.total_size
        done, size, stairs = position, self.cycle_first_step_size, self.cycle_first_stair_count
        if position > self.cycle_first_step_size:
            done = self.total_size - position
            size, stairs = self.cycle_second_step_size, self.cycle_second_stair_count
        return math.floor(done * stairs / size) / stairs if stairs > 0 else done / size

    def _decay(self, rate: float) -> float:
        if not self.decay_step_size:
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def _move_to(self, iteration: int) -> None:
        super()._move_to(iteration)
        if self.cycle_momentum:
            # The first optimizer step has the smallest momentum, against the formula: DeepSpeed begins so.
            betas = [(mom, 0.99) for mom in self.min_moms] if iteration < 0 else self.get_mom()
            for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = pair


VALID_LR_SCHEDULES = {kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def build_scheduler(scheduler: SchedulerConfig | None, optimizer: Any) -> Schedule | None:
    """The schedule that the configuration names (its type and parameters are checked on reading), None without one."""
    if scheduler is None:
        return None
    return VALID_LR_SCHEDULES[scheduler.type](optimizer, **scheduler.params)
