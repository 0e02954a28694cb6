"""The ``optimizer`` and ``scheduler`` sections: which kinds there are, and the settings of each.

``params`` is one section with the settings of all kinds, so that the message about a misspelt key
can name the right one. ``contradictions`` names the settings that the chosen kind does not have.
Settings that the user did not write are left to the optimizer or schedule. Their defaults are those
of DeepSpeed. Nothing here makes an optimizer."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field

from zero.config.keys import (
    Betas,
    Count,
    Fraction,
    Momenta,
    NonNegative,
    Positive,
    Rates,
    Section,
    acts,
    choice,
    integer,
    only,
    unused,
)

# Lower-case class name -> why it cannot work here, in the words that follow the name.
_COMPRESSES = "compresses the momentum across ranks by itself"
_WRAPS = "wraps another optimizer; take a schedule-free class, such as AdamWScheduleFree"
REFUSED = {
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), _COMPRESSES),
    "schedulefreewrapper": _WRAPS,
    "lbfgs": "evaluates the model several times in a step",
    "sparseadam": "needs sparse gradients, and they are reduced as dense ones",
}
# The same for several processes. In one process they work.
_SUMS = "takes sums over all parameters, and each process has some of them"
REFUSED_ON_SEVERAL = {
    **dict.fromkeys(
        ("prodigy", "dadaptadam", "dadaptsgd", "dadaptlion", "dadaptadagrad", "dadaptadan"), _SUMS
    ),
    **dict.fromkeys(("fusedlamb", "nvlamb", "adagc", "adams", "prodigyplusschedulefree"), _SUMS),
    "muonwithauxadam": "exchanges tensors between processes by itself; take its single-device "
    "class",
}
ELEMENTWISE = (
    *("Adam", "AdamW", "SGD", "Adagrad", "Lion"),
    *("RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"),
)
TYPES = (*ELEMENTWISE, "Muon")
_DEEPSPEEDS_ADAM = {
    "adam_w_mode",
    "torch_adam",
    "bias_correction",
    "set_grad_none",
    "fp32_optimizer_states",
}
# Settings that DeepSpeed accepts beside those of torch's class.
_DEEPSPEEDS = {
    "Adam": _DEEPSPEEDS_ADAM,
    "AdamW": _DEEPSPEEDS_ADAM,
    "Adagrad": {"fp32_optimizer_states"},
    "Lion": {"set_grad_none", "fp32_optimizer_states"},
    "Muon": {"torch_adam", "fp32_optimizer_states"},
}


def why_refused(name: str, world_size: int) -> str | None:
    """The message for an optimizer class of this name if it cannot work on so many processes, else
    None.
    """
    reason = REFUSED.get(name.lower()) or (
        REFUSED_ON_SEVERAL.get(name.lower()) if world_size > 1 else None
    )
    return reason and f"{name} cannot be used: it {reason}; use another one, such as AdamW"


def _optimizer_type(given: str) -> str:
    if refusal := why_refused(given, 1):
        raise ValueError(refusal)
    for name in TYPES:
        if name.lower() == given.lower():
            return name
    raise ValueError(
        f"expected one of {', '.join(TYPES)}, got {given!r}; pass any other to initialize()"
    )


def optimizer_defaults(kind: str, torch_adam: bool = False) -> dict[str, Any]:
    """The keys of ``optimizer.params`` that an optimizer of this type has, with their defaults."""
    if kind == "Muon":
        # Those of matrices. Other parameters have `adam_lr` 3e-4; see `zero.optim.muon`.
        defaults = {
            "lr": 0.02,
            "muon_lr": None,
            "momentum": 0.95,
            "ns_method": "gram",
            "per_head_muon": False,
        }
        defaults |= {
            "weight_decay": 0.0,
            "adam_lr": None,
            "betas": (0.9, 0.95),
            "eps": 1e-10,
            "adam_w_mode": True,
        }
    elif kind == "Lion":
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    else:
        arguments = inspect.signature(getattr(torch.optim, kind)).parameters
        defaults = {key: argument.default for key, argument in arguments.items() if key != "params"}
    if kind in ("Adam", "AdamW") and not torch_adam:
        # As in DeepSpeed: no weight decay by default.
        defaults["weight_decay"] = 0.0
    if kind == "Adam":
        # The same as adam_w_mode.
        del defaults["decoupled_weight_decay"]
    return dict.fromkeys(_DEEPSPEEDS.get(kind, ())) | defaults


class Settings(Section):
    """Settings that are passed on with ``**``: what the user wrote, without the keys that have no
    effect.
    """

    def keys(self) -> list[str]:
        return sorted(key for key in self.model_fields_set if not self.about(key).get("unused"))

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


_NOT_COMPILED = "the engine's step is neither captured nor differentiated"


def _in_order(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1]:
        raise ValueError(f"expected two numbers above 0, the smaller one first, got {list(pair)}")
    return pair


_Factors = Annotated[tuple[float, float], Field(strict=False), AfterValidator(_in_order)]


class OptimizerParams(Settings):
    """Keyword arguments of the optimizer. A setting that its type does not have is an error.

    Without a value the optimizer's own default holds. That is torch's, except that `weight_decay`
    of Adam and AdamW is 0, as in DeepSpeed."""

    lr: NonNegative | None = acts(None, "Learning rate.", auto="learning_rate")
    weight_decay: NonNegative | None = acts(None, "Weight decay.", auto="weight_decay")
    betas: Betas | None = acts(
        None, "Decay rates of Adam's or Lion's moments.", auto="adam_beta1, adam_beta2"
    )
    eps: NonNegative | None = acts(
        None, "Added to the denominator of the update.", auto="adam_epsilon"
    )
    foreach: bool | None = acts(None, "torch's implementation over lists of tensors.")
    fused: bool | None = acts(
        None, "torch's fused implementation. Default of Adam and AdamW on a GPU: true."
    )
    maximize: bool = acts(False, "Maximize the loss.")
    capturable: only(bool, False, _NOT_COMPILED) = False
    differentiable: only(bool, False, _NOT_COMPILED) = False

    adam_w_mode: bool = acts(
        True, "Adam, AdamW, Muon: decay weights apart from the gradient. Always true for AdamW."
    )
    torch_adam: bool = acts(False, "Adam, AdamW: torch's own class and defaults.")
    amsgrad: bool = acts(False, "Adam, AdamW: keep the largest second moment.")
    muon_lr: NonNegative | None = acts(
        None, "Muon: learning rate of the matrices. Default: lr, or 0.02."
    )
    adam_lr: NonNegative | None = acts(
        None, "Muon: learning rate of all other parameters. Default: lr, or 3e-4."
    )
    ns_method: choice("gram", "standard") = unused(
        "gram", "both compute the same; torch's Muon has its own kernel"
    )
    per_head_muon: only(bool, False, "matrices of attention are updated as a whole") = False
    bias_correction: only(bool, True, "Adam always corrects the bias") = True
    set_grad_none: bool = unused(True, "gradients are always freed")
    fp32_optimizer_states: bool = unused(True, "optimizer states are always fp32")

    momentum: Fraction | None = acts(None, "SGD, RMSprop, Muon.")
    dampening: Fraction | None = acts(None, "SGD.")
    nesterov: bool = acts(False, "SGD.")
    alpha: Fraction | None = acts(None, "RMSprop, ASGD.")
    centered: bool = acts(False, "RMSprop.")
    lr_decay: NonNegative | None = acts(None, "Adagrad.")
    initial_accumulator_value: NonNegative | None = acts(None, "Adagrad.")
    momentum_decay: NonNegative | None = acts(None, "NAdam.")
    decoupled_weight_decay: bool = acts(False, "NAdam, RAdam.")
    rho: Fraction | None = acts(None, "Adadelta.")
    lambd: NonNegative | None = acts(None, "ASGD.")
    t0: NonNegative | None = acts(None, "ASGD.")
    etas: _Factors | None = acts(None, "Rprop: factors of decrease and increase.")
    step_sizes: _Factors | None = acts(None, "Rprop: smallest and largest step.")


class OptimizerConfig(Section):
    """The optimizer.

    Without this section the Trainer's own optimizer, or the one that the script gives, is used.
    """

    type: Annotated[str, AfterValidator(_optimizer_type)] = acts(
        ...,
        says={
            "Adam": "AdamW, as in DeepSpeed, unless `adam_w_mode` is false.",
            "AdamW": "Adam with weight decay apart from the gradient, as torch's AdamW.",
            "Lion": "Steps by the sign of one moment: 4 bytes a parameter less than Adam's two.",
            "Muon": "Muon updates hidden matrices; AdamW updates the rest.",
            "other": "The class torch.optim.{}, with its defaults.",
        },
    )
    """Adam, AdamW, SGD, Adagrad, Lion, RMSprop, NAdam, RAdam, Adamax, Adadelta, ASGD, Rprop, Muon, in any letter case.
    Adam means AdamW unless `adam_w_mode` is false, as in DeepSpeed. Muon updates hidden matrices; AdamW updates the
    rest. Pass an optimizer of any other class to `initialize`."""
    params: OptimizerParams = Field(default_factory=OptimizerParams)
    legacy_fusion: bool = unused(False, "acts on DeepSpeed's fp16 optimizer without ZeRO only")

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, message) for settings that an optimizer of this type does not have."""
        kinds = {kind: optimizer_defaults(kind) for kind in TYPES}
        yield from _misplaced("optimizer", self.type, self.params.model_fields_set, kinds)


class SchedulerParams(Settings):
    """Settings of the schedule. One that its type does not have is an error. Rates are per step."""

    last_batch_iteration: integer(-1) = acts(-1, "Step to go on from.")

    warmup_num_steps: Count = acts(1000, "Steps of the warm-up.", auto="warmup_steps")
    warmup_type: choice("log", "linear") = acts(
        "log",
        "Shape of the warm-up.",
        says={
            "log": "The rate rises with the logarithm of the step.",
            "linear": "The rate rises in a line.",
        },
    )
    warmup_min_lr: Rates = acts(0.0, "Rate at the start.", auto="always 0")
    warmup_max_lr: Rates | None = acts(None, auto="learning_rate")
    """Rate after the warm-up. Default: the optimizer's; WarmupDecayLR: 0.001."""
    total_num_steps: Positive | None = acts(
        None, auto="the steps that follow from max_steps or num_train_epochs"
    )
    """Steps until the end of the decay. Required."""
    warmup_min_ratio: NonNegative = acts(0.0, "Part of the optimizer's rate at the start.")
    cos_min_ratio: NonNegative = acts(0.0001, "Part of the optimizer's rate at the end.")

    lr_range_test_min_lr: Rates = acts(1e-3, "Rate at the start.")
    lr_range_test_step_size: Positive = acts(2000, "Steps of one interval.")
    lr_range_test_step_rate: NonNegative = acts(
        1.0, "Part of the first rate that is added in one interval."
    )
    lr_range_test_staircase: bool = acts(False, "true: the rate rises at the end of each interval.")

    cycle_min_lr: Rates | None = acts(None, "Lowest rate. Required.")
    cycle_max_lr: Rates | None = acts(None, "Highest rate. Required.")
    decay_lr_rate: NonNegative = acts(
        0.0, "Decay of the rate after the cycle, for each `decay_step_size` steps."
    )
    cycle_first_step_size: Positive = acts(2000, "Steps of the rise.")
    cycle_second_step_size: Count | None = acts(
        None, "Steps of the fall. Default: as many as of the rise."
    )
    cycle_first_stair_count: Count = acts(0, "Stairs of the rise. 0: a straight line.")
    cycle_second_stair_count: Count | None = acts(
        None, "Stairs of the fall. Default: as many as of the rise."
    )
    decay_step_size: Count = acts(0, "Steps of one interval of the decay. 0: no decay.")
    cycle_momentum: bool = True
    """The first of the optimizer's `betas` moves against the rate; the second is 0.99."""
    cycle_min_mom: Momenta = acts(0.8, "Lowest momentum.")
    cycle_max_mom: Momenta = acts(0.9, "Highest momentum.")
    decay_mom_rate: NonNegative = acts(0.0, "Growth of the momentum after the cycle.")


def _keys_like(*beginnings: str) -> set[str]:
    return {
        key for key in SchedulerParams.model_fields if key.startswith(("last_batch", *beginnings))
    }


_WARMUP_LR = _keys_like("warmup_num", "warmup_type", "warmup_min_lr", "warmup_max_lr")
SCHEDULE_KEYS = {
    "WarmupLR": _WARMUP_LR,
    "WarmupDecayLR": _WARMUP_LR | {"total_num_steps"},
    "WarmupCosineLR": _keys_like(
        "warmup_num", "warmup_type", "warmup_min_ratio", "total_num", "cos_"
    ),
    "OneCycle": _keys_like("cycle_", "decay_"),
    "LRRangeTest": _keys_like("lr_range_test_"),
}
REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}

# (a setting, another one that it must not exceed)
_ORDERED = (
    ("warmup_min_lr", "warmup_max_lr"),
    ("warmup_num_steps", "total_num_steps"),
    ("cycle_min_lr", "cycle_max_lr"),
    ("cycle_min_mom", "cycle_max_mom"),
)


def _exceeds(low: Any, high: Any) -> bool:
    """Whether a number in `low` is above its counterpart in `high`.

    Each is a number, or a list by parameter group.
    """
    if low is None or high is None:
        return False
    lows, highs = (value if isinstance(value, list) else [value] for value in (low, high))
    groups = max(len(lows), len(highs))
    return any(
        a > b
        for a, b in zip(lows * (groups // len(lows)), highs * (groups // len(highs)), strict=False)
    )


class SchedulerConfig(Section):
    """The learning-rate schedule, with DeepSpeed's formulas.

    Without this section the Trainer's own is used.
    """

    type: choice(*SCHEDULE_KEYS) = acts(
        ...,
        says={
            "WarmupLR": "The rate rises for `warmup_num_steps` steps, then stays.",
            "WarmupDecayLR": "The rate rises for `warmup_num_steps` steps, then falls in a line to "
            "0.",
            "WarmupCosineLR": "The rate rises for `warmup_num_steps` steps, then falls along a "
            "cosine.",
            "OneCycle": "The rate rises once from `cycle_min_lr` to `cycle_max_lr`, falls back, "
            "and may then decay.",
            "LRRangeTest": "The rate rises all the time, which shows the largest one that works.",
        },
    )
    """The schedule, in any letter case."""
    params: SchedulerParams = Field(default_factory=SchedulerParams)

    def contradictions(self, auto: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, message) for settings that are missing or misplaced.

        ``auto`` ones will be given.
        """
        coming = {
            key.removeprefix("scheduler.params.")
            for key in auto
            if key.startswith("scheduler.params.")
        }
        for key in REQUIRED.get(self.type, ()):
            if getattr(self.params, key) is None and key not in coming:
                yield f"scheduler.params.{key}", f"is required by {self.type}"
        for low, high in _ORDERED:
            if {low, high} <= self.params.model_fields_set and _exceeds(
                self.params[low], self.params[high]
            ):
                message = (
                    f"{self.params[low]} is more than {high}, which is {self.params[high]}; "
                    "exchange them"
                )
                yield f"scheduler.params.{low}", message
        given = self.params.model_fields_set | coming
        yield from _misplaced("scheduler", self.type, given, SCHEDULE_KEYS)


def _misplaced(
    section: str, kind: str, given: Iterable[str], keys_of: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    for key in sorted(set(given) - set(keys_of[kind])):
        owners = [other for other, keys in keys_of.items() if key in keys]
        message = (
            f"is a setting of {', '.join(owners)}, not of {kind}; change {section}.type or "
            "delete it"
        )
        yield f"{section}.params.{key}", message
