"""DeepSpeed's learning-rate schedules, by the section ``scheduler`` or by options of the command
line.

Formulas, parameter names and defaults are those of ``deepspeed.runtime.lr_schedules`` (0.19.8). All
are functions of ``n``, the number of calls of ``step`` so far, minus one: -1 for a schedule just
made. Optimizer step 1 uses the rate for -1, optimizer step 2 that for 0, and so on. Rates do not
depend on batch size or number of ranks.

Arguments common to all: ``optimizer``, anything with ``param_groups``, whose ``lr`` is set on
construction and by every step (a tensor there is filled in place); ``last_batch_iteration``, the
``n`` to start from. Rates and momenta are one number, or a list of one for each parameter group.
Raises ValueError for a list of another length and for a number of steps that is too small. Defaults
are those of ``zero.config.optim.SchedulerParams``. This file knows nothing of the engine."""

from __future__ import annotations

import logging
import math
from argparse import ArgumentParser, Namespace
from functools import partial
from inspect import Parameter, Signature
from typing import Any

from zero.config.optim import REQUIRED, SchedulerConfig, SchedulerParams

logger = logging.getLogger("zero")

_ORDINARY = Parameter.POSITIONAL_OR_KEYWORD
_DEFAULTS = {name: field.default for name, field in SchedulerParams.model_fields.items()}


def __getattr__(name: str) -> str:
    """DeepSpeed's module has a constant for each parameter:

    ``WARMUP_MIN_LR`` is "warmup_min_lr".
    """
    if name.isupper() and name.lower() in _DEFAULTS:
        return name.lower()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"

# The schedules' parameters between `optimizer` and `last_batch_iteration`, in DeepSpeed's order.
_WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type"
_DECAY = f"total_num_steps {_WARMUP}"
_COSINE = "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type"
_RANGE_TEST = (
    "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase"
)
_CYCLE = """cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count
    cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate"""


class Schedule:
    """What all schedules share.

    A subclass names its parameters in order; they become attributes.
    """

    min_lrs: list[float]
    max_lrs: list[float]

    def __init_subclass__(cls, parameters: str = "", **defaults: object) -> None:
        values = (
            _DEFAULTS
            | defaults
            | dict.fromkeys(("optimizer", *REQUIRED.get(cls.__name__, ())), Parameter.empty)
        )
        names = ["optimizer", *parameters.split(), "last_batch_iteration"]
        cls.__signature__ = Signature(
            [Parameter(name, _ORDINARY, default=values[name]) for name in names]
        )

    def __init__(self, *args: Any, **kwargs: Any):
        given = self.__signature__.bind(*args, **kwargs)
        given.apply_defaults()
        vars(self).update(given.arguments)
        self._prepare()
        self._move_to(self.last_batch_iteration)

    def _prepare(self) -> None:
        """Check the settings and derive what the formulas need."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The rate of each parameter group by the formula."""
        height = self._height()
        return [
            low + (high - low) * height
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _height(self) -> float:
        """Where between the smallest and the largest rate, from 0 to 1."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rate that each parameter group was last given."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next rate, or to a given one; called after each optimizer step that was not
        skipped.
        """
        self._move_to(
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )

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
        if len(values) == groups:
            return values
        raise ValueError(
            f"scheduler.params.{name}: {len(values)} values for {groups} parameter groups; give "
            "one number"
        )

    def _check_steps(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or value < minimum:
            raise ValueError(
                f"scheduler.params.{name}: expected at least {minimum} steps, got {value!r}"
            )


class WarmupLR(Schedule, parameters=_WARMUP):
    """Raise the rate from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps`` steps,
    then hold it.

    With n = -1 the rate is ``warmup_min_lr``, and with n = 0 again. Fewer than 2 steps act as 2.
    ``warmup_max_lr``: by default the ``lr`` that each group has. ``warmup_type``: "log", log(n + 1)
    / log(warmup_num_steps) of the way, or "linear", n / warmup_num_steps."""

    warmup_min_lr, warmup_max_lr, warmup_min_ratio = 0.0, None, 0.0

    def _prepare(self) -> None:
        self._check_steps("warmup_num_steps", 0)
        self.warmup_num_steps = max(2, self.warmup_num_steps)
        if self.warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            logger.warning(
                "warmup_type %r is neither 'log' nor 'linear'; 'log' is used", self.warmup_type
            )
            self.warmup_type = WARMUP_LOG_RATE
        if self.warmup_max_lr is None:
            self.warmup_max_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._per_group("warmup_min_lr")
        self.max_lrs = self._per_group("warmup_max_lr")

    def _height(self) -> float:
        n, steps = self.last_batch_iteration, self.warmup_num_steps
        if n < 0:
            return 0.0
        if n >= steps:
            return self._after_warmup(n)
        warm = (
            math.log(n + 1) / math.log(steps) if self.warmup_type == WARMUP_LOG_RATE else n / steps
        )
        return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * warm

    def _after_warmup(self, n: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR, parameters=_DECAY, warmup_max_lr=0.001):
    """As :class:`WarmupLR`, then down to ``warmup_min_lr`` in a straight line until step
    ``total_num_steps``.
    """

    def _after_warmup(self, n: int) -> float:
        return max(
            0.0, (self.total_num_steps - n) / max(1.0, self.total_num_steps - self.warmup_num_steps)
        )


class WarmupCosineLR(WarmupLR, parameters=_COSINE):
    """Scale each group's own ``lr``: from ``warmup_min_ratio`` up to 1, then along a cosine to
    ``cos_min_ratio``.

    The cosine ends at step ``total_num_steps``; the ratio stays there. With n = -1 the rate is 0.
    """

    def get_lr_ratio(self) -> float:
        """The present factor on the groups' own rates."""
        return self._height()

    def _after_warmup(self, n: int) -> float:
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        cosine = math.cos(math.pi * min(1.0, (n - self.warmup_num_steps + 1) / length))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + cosine) / 2)


class LRRangeTest(Schedule, parameters=_RANGE_TEST):
    """Rates that rise all the time, to see where training diverges (arXiv 1803.09820).

    The rate is ``lr_range_test_min_lr * (1 + lr_range_test_step_rate * (n + 1) /
    lr_range_test_step_size)``; with ``lr_range_test_staircase`` the quotient is rounded down."""

    def _prepare(self) -> None:
        self._check_steps("lr_range_test_step_size", 1)
        self.min_lrs = self._per_group("lr_range_test_min_lr")

    def get_lr(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return [rate * (1 + self.lr_range_test_step_rate * intervals) for rate in self.min_lrs]


class OneCycle(Schedule, parameters=_CYCLE):
    """One cycle of the rate, and of the momentum in the other direction, then decay (arXiv
    1803.09820).

    The rate rises from ``cycle_min_lr`` to ``cycle_max_lr`` in ``cycle_first_step_size`` steps, and
    falls back in ``cycle_second_step_size`` steps (by default as many). It follows straight lines,
    or stairs if their number is not
    0. After the cycle the rate is divided by ``1 + decay_lr_rate * steps / decay_step_size``, if
    ``decay_step_size`` is not 0. The momentum is multiplied by the same with ``decay_mom_rate``.
    The momentum is the first of the optimizer's ``betas``; the second becomes 0.99. With
    ``cycle_momentum=False``, or if the optimizer has no ``betas``, both stay."""

    def _prepare(self) -> None:
        if self.cycle_second_step_size is None:
            self.cycle_second_step_size = self.cycle_first_step_size
        if self.cycle_second_stair_count is None:
            self.cycle_second_stair_count = self.cycle_first_stair_count
        self._check_steps("cycle_first_step_size", 1)
        self._check_steps("cycle_second_step_size", 0)
        self.total_size = self.cycle_first_step_size + self.cycle_second_step_size
        self.step_ratio = self.cycle_first_step_size / self.total_size  # read by scripts
        self.min_lrs = self._per_group("cycle_min_lr")
        self.max_lrs = self._per_group("cycle_max_lr")
        self.min_moms = self._per_group("cycle_min_mom")
        self.max_moms = self._per_group("cycle_max_mom")
        if self.cycle_momentum and not all(
            "betas" in group for group in self.optimizer.param_groups
        ):
            logger.warning(
                "cycle_momentum has no effect: %s has no betas", type(self.optimizer).__name__
            )
            self.cycle_momentum = False

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
            moms = [
                high - (high - low) * height
                for low, high in zip(self.min_moms, self.max_moms, strict=True)
            ]
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
            # The first optimizer step has the smallest momentum, against the formula: DeepSpeed
            # begins so.
            betas = [(mom, 0.99) for mom in self.min_moms] if iteration < 0 else self.get_mom()
            for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = pair


VALID_LR_SCHEDULES = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build_scheduler(scheduler: SchedulerConfig | None, optimizer: Any) -> Schedule | None:
    """The schedule that the configuration names (its type and parameters are checked on reading),
    None without one.
    """
    if scheduler is None:
        return None
    return VALID_LR_SCHEDULES[scheduler.type](optimizer, **scheduler.params)


# -- a schedule on the command line

# Defaults of the options that differ from those of the schedules; None leaves the schedule's own.
_OF_OPTIONS = {
    **{"lr_range_test_step_size": 1000, "cycle_first_step_size": 1000, "decay_step_size": 1000},
    **{
        "cycle_first_stair_count": None,
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "cycle_momentum": False,
    },
    **{"warmup_max_lr": 0.001, "warmup_min_ratio": 0.01, "cos_min_ratio": 0.01},
}
# The options of each schedule, named as its parameters.
OPTIONS: dict[str, dict[str, Any]] = {
    name: {
        key: (_DEFAULTS | _OF_OPTIONS)[key]
        for key in kind.__signature__.parameters
        if key not in ("optimizer", "total_num_steps", "last_batch_iteration")
    }
    for name, kind in VALID_LR_SCHEDULES.items()
}
# Which of them is the learning rate; WarmupCosineLR scales those of the param groups.
_RATES = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}
_RATES |= dict.fromkeys(("WarmupLR", "WarmupDecayLR"), "warmup_max_lr")


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Give a script's parser `--lr_schedule` and an option for each parameter of the schedules."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", choices=sorted(OPTIONS), help="learning-rate schedule")
    for name, default in {
        name: value for options in OPTIONS.values() for name, value in options.items()
    }.items():
        if default is False:
            group.add_argument(f"--{name}", action="store_true")
        else:
            group.add_argument(
                f"--{name}", type=int if default is None else type(default), default=default
            )
    return parser


def _override(schedule: str, args: Namespace, params: dict[str, Any]) -> None:
    given = {name: getattr(args, name, None) for name in OPTIONS[schedule]}
    params.update({name: value for name, value in given.items() if value is not None})


# Each writes what `args` has of a schedule's options into `params`.
override_lr_range_test_params = partial(_override, "LRRangeTest")
override_1cycle_params = partial(_override, "OneCycle")
override_warmupLR_params = partial(_override, "WarmupLR")


def get_config_from_args(args: Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """(the section `scheduler` of a configuration, None) or (None, why there is none)."""
    schedule = getattr(args, "lr_schedule", None)
    if schedule not in OPTIONS:
        return None, f"--lr_schedule: {schedule} is none of {', '.join(OPTIONS)}"
    params: dict[str, Any] = {}
    _override(schedule, args, params)
    return {"type": schedule, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """(the learning rate in a section `scheduler`, "") or (None, why there is none)."""
    schedule = config.get("type")
    rate = config.get("params", {}).get(_RATES.get(schedule, ""))
    return (
        rate,
        ""
        if rate is not None
        else f"scheduler.type {schedule}: no learning rate in scheduler.params",
    )
