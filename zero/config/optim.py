"""The ``optimizer`` and ``scheduler`` sections: which kinds there are, and the settings of each.

``params`` is one section with the settings of all kinds, so that a misspelt key finds its neighbour; ``contradictions``
then names those that the chosen kind does not have. Settings that the user did not write are left to the optimizer or
schedule, whose defaults are DeepSpeed's.
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field

from zero.config.keys import Betas, Count, Int, NonNegative, Positive, Rates, Section, only, unused

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
# What DeepSpeed accepts beyond the settings of torch's class of that name, or, for Lion, instead of one.
_DEEPSPEEDS = {
    "Adam": _DEEPSPEEDS_ADAM,
    "AdamW": _DEEPSPEEDS_ADAM,
    "Adagrad": {"fp32_optimizer_states"},
    "Lion": {"lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states"},
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


def optimizer_keys(kind: str) -> set[str]:
    """The keys of ``optimizer.params`` that an optimizer of this type has."""
    keys = set(_DEEPSPEEDS.get(kind, ()))
    if kind != "Lion":
        keys |= inspect.signature(getattr(torch.optim, kind)).parameters.keys() - {"params"}
    # Of Adam it is the twin of adam_w_mode.
    return keys - {"decoupled_weight_decay"} if kind == "Adam" else keys


class Settings(Section):
    """Settings that are passed on with ``**``: what the user wrote, without the keys that have no effect."""

    def keys(self) -> list[str]:
        return sorted(key for key in self.model_fields_set if not type(self).model_fields[key].json_schema_extra)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


_NOT_COMPILED = "the engine's step is neither captured nor differentiated"
_Factors = Annotated[tuple[float, float] | None, Field(strict=False)]


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
    momentum: NonNegative | None = None
    dampening: float | None = None
    nesterov: bool = False
    alpha: NonNegative | None = None
    centered: bool = False

    # Adagrad
    lr_decay: NonNegative | None = None
    initial_accumulator_value: NonNegative | None = None

    # NAdam, RAdam, Adadelta, ASGD, Rprop
    momentum_decay: NonNegative | None = None
    decoupled_weight_decay: bool = False
    rho: NonNegative | None = None
    lambd: NonNegative | None = None
    t0: NonNegative | None = None
    etas: _Factors = None
    step_sizes: _Factors = None


class OptimizerConfig(Section):
    """``optimizer``: its type, in any case. As in DeepSpeed, "Adam" means AdamW unless ``adam_w_mode`` is false."""

    type: Annotated[str, AfterValidator(_optimizer_type)]
    params: OptimizerParams = Field(default_factory=OptimizerParams)
    legacy_fusion: bool = unused(False, "acts on DeepSpeed's fp16 optimizer without ZeRO only")

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(dotted key, message) of settings that an optimizer of this type does not have."""
        kinds = {kind: optimizer_keys(kind) for kind in ELEMENTWISE}
        yield from _misplaced("optimizer", self.type, self.params.model_fields_set, kinds)


class SchedulerParams(Settings):
    """``scheduler.params`` of all schedules; None stands for a schedule's own default (rates: per step, not scaled)."""

    last_batch_iteration: Annotated[Int, Field(ge=-1)] = -1

    warmup_num_steps: Count = 1000
    warmup_type: Literal["log", "linear"] = "log"
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    total_num_steps: Positive | None = None
    warmup_min_ratio: NonNegative = 0.0
    cos_min_ratio: NonNegative = 0.0001

    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: Positive = 2000
    lr_range_test_step_rate: float = 1.0
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
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
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
_REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}


class SchedulerConfig(Section):
    """``scheduler``."""

    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
    params: SchedulerParams = Field(default_factory=SchedulerParams)

    def contradictions(self, auto: Iterable[str]) -> Iterator[tuple[str, str]]:
        """(dotted key, message) of settings that the schedule needs or does not have; ``auto`` ones will be given."""
        coming = {key.removeprefix("scheduler.params.") for key in auto if key.startswith("scheduler.params.")}
        for key in _REQUIRED.get(self.type, ()):
            if getattr(self.params, key) is None and key not in coming:
                yield f"scheduler.params.{key}", f"is required by {self.type}"
        given = self.params.model_fields_set | coming
        yield from _misplaced("scheduler", self.type, given, SCHEDULE_KEYS)


def _misplaced(section: str, kind: str, given: Iterable[str], keys_of: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in sorted(set(given) - set(keys_of[kind])):
        owners = [other for other, keys in keys_of.items() if key in keys]
        message = f"is a setting of {', '.join(owners)}, not of {kind}; change {section}.type or delete it"
        yield f"{section}.params.{key}", message
