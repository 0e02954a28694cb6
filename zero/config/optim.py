"""The ``optimizer`` and ``scheduler`` sections: which kinds there are, and the settings of each.

``params`` is one section with the settings of all kinds, so that a misspelt key finds its neighbour; ``contradictions``
then names those that the chosen kind does not have. Settings that the user did not write are left to the optimizer or
schedule, whose defaults are DeepSpeed's.
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field

from zero.config.keys import (
    Betas,
    Count,
    Fraction,
    Int,
    Momenta,
    NonNegative,
    Positive,
    Rates,
    Section,
    choice,
    only,
    unused,
)

# Lower-case class name -> why its state cannot be cut into shards at any element.
NOT_ELEMENTWISE = {
    **dict.fromkeys(("lamb", "fusedlamb", "lars"), "it scales the update of a layer by norms of the whole layer"),
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), "it compresses the momentum across ranks by itself"),
    **dict.fromkeys(("muon", "muonwithauxadam"), "it orthogonalizes the momentum of whole matrices"),
    **dict.fromkeys(("shampoo", "soap"), "it preconditions with statistics of whole matrices"),
    **dict.fromkeys(("adafactor", "came", "sm3"), "its second moments are sums over rows and columns of matrices"),
    "lbfgs": "it takes inner products over all parameters",
    "sparseadam": "it needs sparse gradients, and they are reduced as dense ones",
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "it sets learning rates by the shapes of whole matrices"),
}
ELEMENTWISE = (
    *("Adam", "AdamW", "SGD", "Adagrad", "Lion"),
    *("RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"),
)
_DEEPSPEEDS_ADAM = {"adam_w_mode", "torch_adam", "bias_correction", "set_grad_none", "fp32_optimizer_states"}
# What DeepSpeed accepts beyond the settings of torch's class of that name.
_DEEPSPEEDS = {
    "Adam": _DEEPSPEEDS_ADAM,
    "AdamW": _DEEPSPEEDS_ADAM,
    "Adagrad": {"fp32_optimizer_states"},
    "Lion": {"set_grad_none", "fp32_optimizer_states"},
}


def why_not_sharded(name: str) -> str | None:
    """The message for an optimizer class of this name if it is not element-wise, else None."""
    reason = NOT_ELEMENTWISE.get(name.lower())
    return reason and f"{name} cannot be sharded: {reason}; use an element-wise optimizer such as AdamW"


def _optimizer_type(given: str) -> str:
    if refusal := why_not_sharded(given):
        raise ValueError(refusal)
    for name in ELEMENTWISE:
        if name.lower() == given.lower():
            return name
    raise ValueError(f"expected one of {', '.join(ELEMENTWISE)}, got {given!r}; pass any other to initialize()")


def optimizer_defaults(kind: str, torch_adam: bool = False) -> dict[str, Any]:
    """The keys of ``optimizer.params`` that an optimizer of this type has, with their defaults."""
    if kind == "Lion":
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    else:
        arguments = inspect.signature(getattr(torch.optim, kind)).parameters
        defaults = {key: argument.default for key, argument in arguments.items() if key != "params"}
    if kind in ("Adam", "AdamW") and not torch_adam:
        # DeepSpeed's decay no weights unless told to.
        defaults["weight_decay"] = 0.0
    if kind == "Adam":
        # The twin of adam_w_mode.
        del defaults["decoupled_weight_decay"]
    return dict.fromkeys(_DEEPSPEEDS.get(kind, ())) | defaults


class Settings(Section):
    """Settings that are passed on with ``**``: what the user wrote, without the keys that have no effect."""

    def keys(self) -> list[str]:
        return sorted(key for key in self.model_fields_set if not type(self).model_fields[key].json_schema_extra)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


_NOT_COMPILED = "the engine's step is neither captured nor differentiated"


def _in_order(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1]:
        raise ValueError(f"expected two numbers above 0, the smaller one first, got {list(pair)}")
    return pair


_Factors = Annotated[tuple[float, float], Field(strict=False), AfterValidator(_in_order)]


class OptimizerParams(Settings):
    """``optimizer.params``: keyword arguments of the optimizer; None stands for its own default.

    ``adam_w_mode`` and ``torch_adam`` choose among the kinds of Adam, ``fused`` and ``foreach`` among implementations.
    """

    lr: NonNegative | None = None
    weight_decay: NonNegative | None = None
    betas: Betas | None = None
    eps: NonNegative | None = None
    foreach: bool | None = None
    fused: bool | None = None
    maximize: bool = False
    capturable: only(bool, False, _NOT_COMPILED) = False
    differentiable: only(bool, False, _NOT_COMPILED) = False

    # Adam
    adam_w_mode: bool = True
    torch_adam: bool = False
    amsgrad: bool = False
    bias_correction: only(bool, True, "Adam always corrects the bias") = True
    set_grad_none: bool = unused(True, "gradients are always freed")
    fp32_optimizer_states: bool = unused(True, "optimizer states are always fp32")

    # SGD, RMSprop
    momentum: Fraction | None = None
    dampening: Fraction | None = None
    nesterov: bool = False
    alpha: Fraction | None = None
    centered: bool = False

    # Adagrad
    lr_decay: NonNegative | None = None
    initial_accumulator_value: NonNegative | None = None

    # NAdam, RAdam, Adadelta, ASGD, Rprop
    momentum_decay: NonNegative | None = None
    decoupled_weight_decay: bool = False
    rho: Fraction | None = None
    lambd: NonNegative | None = None
    t0: NonNegative | None = None
    etas: _Factors | None = None
    step_sizes: _Factors | None = None


class OptimizerConfig(Section):
    """``optimizer``: its type, in any case. As in DeepSpeed, "Adam" means AdamW unless ``adam_w_mode`` is false."""

    type: Annotated[str, AfterValidator(_optimizer_type)]
    params: OptimizerParams = Field(default_factory=OptimizerParams)
    legacy_fusion: bool = unused(False, "acts on DeepSpeed's fp16 optimizer without ZeRO only")

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(dotted key, message) of settings that an optimizer of this type does not have."""
        kinds = {kind: optimizer_defaults(kind) for kind in ELEMENTWISE}
        yield from _misplaced("optimizer", self.type, self.params.model_fields_set, kinds)


class SchedulerParams(Settings):
    """``scheduler.params`` of all schedules; None stands for a schedule's own default (rates: per step, not scaled)."""

    last_batch_iteration: Annotated[Int, Field(ge=-1)] = -1

    warmup_num_steps: Count = 1000
    warmup_type: choice("log", "linear") = "log"
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    total_num_steps: Positive | None = None
    warmup_min_ratio: NonNegative = 0.0
    cos_min_ratio: NonNegative = 0.0001

    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: Positive = 2000
    lr_range_test_step_rate: NonNegative = 1.0
    lr_range_test_staircase: bool = False

    cycle_min_lr: Rates | None = None
    cycle_max_lr: Rates | None = None
    decay_lr_rate: NonNegative = 0.0
    cycle_first_step_size: Positive = 2000
    cycle_second_step_size: Count | None = None
    cycle_first_stair_count: Count = 0
    cycle_second_stair_count: Count | None = None
    decay_step_size: Count = 0
    cycle_momentum: bool = True
    cycle_min_mom: Momenta = 0.8
    cycle_max_mom: Momenta = 0.9
    decay_mom_rate: NonNegative = 0.0


def _keys_like(*beginnings: str) -> set[str]:
    return {key for key in SchedulerParams.model_fields if key.startswith(("last_batch", *beginnings))}


_WARMUP_LR = _keys_like("warmup_num", "warmup_type", "warmup_min_lr", "warmup_max_lr")
SCHEDULE_KEYS = {
    "WarmupLR": _WARMUP_LR,
    "WarmupDecayLR": _WARMUP_LR | {"total_num_steps"},
    "WarmupCosineLR": _keys_like("warmup_num", "warmup_type", "warmup_min_ratio", "total_num", "cos_"),
    "OneCycle": _keys_like("cycle_", "decay_"),
    "LRRangeTest": _keys_like("lr_range_test_"),
}
REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}

# (a setting, the one that it must not exceed)
_ORDERED = (
    ("warmup_min_lr", "warmup_max_lr"),
    ("warmup_num_steps", "total_num_steps"),
    ("cycle_min_lr", "cycle_max_lr"),
    ("cycle_min_mom", "cycle_max_mom"),
)


def _exceeds(low: Any, high: Any) -> bool:
    """Whether one of the numbers, each one for all parameter groups or a list, is above its counterpart."""
    if low is None or high is None:
        return False
    lows, highs = (value if isinstance(value, list) else [value] for value in (low, high))
    groups = max(len(lows), len(highs))
    return any(a > b for a, b in zip(lows * (groups // len(lows)), highs * (groups // len(highs)), strict=False))


class SchedulerConfig(Section):
    """``scheduler``."""

    type: choice(*SCHEDULE_KEYS)
    params: SchedulerParams = Field(default_factory=SchedulerParams)

    def contradictions(self, auto: Iterable[str]) -> Iterator[tuple[str, str]]:
        """(dotted key, message) of settings that the schedule needs or does not have; ``auto`` ones will be given."""
        coming = {key.removeprefix("scheduler.params.") for key in auto if key.startswith("scheduler.params.")}
        for key in REQUIRED.get(self.type, ()):
            if getattr(self.params, key) is None and key not in coming:
                yield f"scheduler.params.{key}", f"is required by {self.type}"
        for low, high in _ORDERED:
            if {low, high} <= self.params.model_fields_set and _exceeds(self.params[low], self.params[high]):
                message = f"{self.params[low]} is more than {high}, which is {self.params[high]}; exchange them"
                yield f"scheduler.params.{low}", message
        given = self.params.model_fields_set | coming
        yield from _misplaced("scheduler", self.type, given, SCHEDULE_KEYS)


def _misplaced(section: str, kind: str, given: Iterable[str], keys_of: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in sorted(set(given) - set(keys_of[kind])):
        owners = [other for other, keys in keys_of.items() if key in keys]
        message = f"is a setting of {', '.join(owners)}, not of {kind}; change {section}.type or delete it"
        yield f"{section}.params.{key}", message
