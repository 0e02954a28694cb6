"""A learning-rate schedule given on the command line: the functions for it of `deepspeed.runtime.lr_schedules`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from typing import Any

_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
_WARMUP_RATES = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_WARMUP}
# The options of each schedule, named as its parameters, with their defaults; None leaves the schedule's own.
OPTIONS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_step_size": 1000,
        "lr_range_test_staircase": False,
    },
    "OneCycle": {
        "cycle_first_step_size": 1000,
        "cycle_first_stair_count": None,
        "cycle_second_step_size": None,
        "cycle_second_stair_count": None,
        "decay_step_size": 1000,
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "decay_lr_rate": 0.0,
        "cycle_momentum": False,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "WarmupLR": _WARMUP_RATES,
    "WarmupDecayLR": _WARMUP_RATES,
    "WarmupCosineLR": {**_WARMUP, "warmup_min_ratio": 0.01, "cos_min_ratio": 0.01},
}
# Which of them is the learning rate; WarmupCosineLR scales those of the param groups.
_RATES = {
    "LRRangeTest": "lr_range_test_min_lr",
    "OneCycle": "cycle_max_lr",
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
}


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Give a script's parser `--lr_schedule` and an option for each parameter of the schedules."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", choices=sorted(OPTIONS), help="learning-rate schedule")
    for name, default in {name: value for options in OPTIONS.values() for name, value in options.items()}.items():
        if default is False:
            group.add_argument(f"--{name}", action="store_true")
        else:
            group.add_argument(f"--{name}", type=int if default is None else type(default), default=default)
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
    return rate, "" if rate is not None else f"scheduler.type {schedule}: no learning rate in scheduler.params"
