"""The sections ``optimizer`` and ``scheduler``: the available types, and the settings of each.

``params`` is one section with the settings of all kinds, so that the message about a misspelt key
can name the right one. ``contradictions`` names the settings that the chosen kind does not have.
Settings that the user did not write are left to the optimizer or schedule. Their defaults are
DeepSpeed's. Nothing here creates an optimizer."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from zero.config import sources
from zero.config.idle import with_idle_keys
from zero.config.keys import (
    WHOLE,
    AnyCase,
    Betas,
    Count,
    Fraction,
    Momenta,
    NonNegative,
    Positive,
    Rates,
    Section,
    key,
)

# Lower-case class name -> why it cannot work here, worded so that it can follow the name.
_COMPRESSES = "compresses the momentum across ranks by itself"
REFUSED = {
    "onebitadam": _COMPRESSES,
    "onebitlamb": _COMPRESSES,
    "zerooneadam": _COMPRESSES,
    "schedulefreewrapper": "wraps another optimizer; use a schedule-free class, such as "
    "AdamWScheduleFree",
    "lbfgs": "evaluates the model several times in a step",
    "sparseadam": "needs sparse gradients, and they are reduced as dense ones",
}
# The same for several processes. In one process they work.
REFUSED_ON_SEVERAL = dict.fromkeys(
    "prodigy dadaptadam dadaptsgd dadaptlion dadaptadagrad dadaptadan "
    "fusedlamb nvlamb adagc adams prodigyplusschedulefree".split(),
    "computes sums over all parameters, and each process has only some of them",
) | {
    "muonwithauxadam": "exchanges tensors between processes by itself; use its single-device class"
}
ELEMENTWISE = "Adam AdamW SGD Adagrad Lion RMSprop NAdam RAdam Adamax Adadelta ASGD Rprop".split()
TYPES = [*ELEMENTWISE, "Muon", "Lamb"]
# Settings that DeepSpeed accepts in addition to those of torch's class.
_ADAM = "adam_w_mode torch_adam bias_correction set_grad_none fp32_optimizer_states"
_DEEPSPEEDS = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": "fp32_optimizer_states",
    "Lion": "set_grad_none fp32_optimizer_states",
    "Lamb": "set_grad_none",
    "Muon": "torch_adam fp32_optimizer_states",
}


def why_refused(name: str, world_size: int) -> str | None:
    """The message for an optimizer class of this name if it cannot work on so many processes, else
    None.
    """
    reason = REFUSED.get(name.lower())
    if reason is None and world_size > 1:
        reason = REFUSED_ON_SEVERAL.get(name.lower())
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
            "weight_decay": 0.0,
            "adam_lr": None,
            "betas": (0.9, 0.95),
            "eps": 1e-10,
            "adam_w_mode": True,
        }
    elif kind == "Lion":
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    elif kind == "Lamb":
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        defaults |= {"bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01}
    else:
        defaults = {**sources.defaults(f"torch.optim.{kind.lower()}", kind)}
    if kind in ("Adam", "AdamW") and not torch_adam:
        # As in DeepSpeed: no weight decay by default.
        defaults["weight_decay"] = 0.0
    if kind == "Adam":
        # The same as adam_w_mode.
        del defaults["decoupled_weight_decay"]
    return dict.fromkeys(_DEEPSPEEDS.get(kind, "").split()) | defaults


class Settings(Section):
    """Settings that are passed on with ``**``: what the user wrote and has an effect."""

    def keys(self) -> list[str]:
        return [name for name in sorted(self.model_fields_set) if "idle" not in self.about(name)]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def _in_order(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1]:
        raise ValueError(f"expected two numbers above 0, the smaller one first, got {list(pair)}")
    return pair


_Factors = Annotated[tuple[float, float], Field(strict=False), AfterValidator(_in_order)]


@with_idle_keys("optimizer.params")
class OptimizerParams(Settings):
    """The arguments of the optimizer. A setting that the chosen type does not have is an error.

    For a setting that you leave out, torch's default is used, except that `weight_decay` of Adam
    and AdamW is 0 by default, as in DeepSpeed.

    Attributes:
        lr: The learning rate.
        weight_decay: The weight decay.
        betas: The decay rates of the moments of Adam, Lion or LAMB.
        eps: Added to the denominator of the update.
        foreach: Use torch's implementation for lists of tensors.
        fused: Use torch's fused implementation. Default for Adam and AdamW on a GPU: true.
        maximize: Maximize the loss.
        adam_w_mode: For Adam and Muon: decay the weights instead of adding to the gradient. Always
            true for AdamW.
        torch_adam: For Adam, AdamW: torch's own class and defaults.
        bias_correction: For Adam, AdamW, Lamb: correct the bias of the moments, which start at 0.
            - false: The moments, which start at 0, are not corrected. Adam then updates each tensor
              as a whole, on the process that owns it.
        amsgrad: For Adam, AdamW: divide by the largest second moment so far.
        max_coeff: For Lamb: the upper limit of the ratio of the weight's to the update's norm.
        min_coeff: For Lamb: its lower limit.
        muon_lr: For Muon: the rate of the matrices. Default: `lr`, or 0.02.
        adam_lr: For Muon: the rate of all other parameters. Default: `lr`, or 3e-4.
        momentum: For SGD, RMSprop, Muon.
        dampening: For SGD.
        nesterov: For SGD.
        alpha: For RMSprop, ASGD.
        centered: For RMSprop.
        lr_decay: For Adagrad.
        initial_accumulator_value: For Adagrad.
        momentum_decay: For NAdam.
        decoupled_weight_decay: For NAdam, RAdam.
        rho: For Adadelta.
        lambd: For ASGD.
        t0: For ASGD.
        etas: For Rprop: the factors by which a step shrinks and grows.
        step_sizes: For Rprop: the smallest and the largest step.
    """

    lr: NonNegative | None = key(None, auto="learning_rate")
    weight_decay: NonNegative | None = key(None, auto="weight_decay")
    betas: Betas | None = key(None, auto="adam_beta1, adam_beta2")
    eps: NonNegative | None = key(None, auto="adam_epsilon")
    foreach: bool | None = None
    fused: bool | None = None
    maximize: bool = False

    adam_w_mode: bool = True
    torch_adam: bool = False
    bias_correction: bool = True
    amsgrad: bool = False
    max_coeff: NonNegative | None = None
    min_coeff: NonNegative | None = None
    muon_lr: NonNegative | None = None
    adam_lr: NonNegative | None = None

    momentum: Fraction | None = None
    dampening: Fraction | None = None
    nesterov: bool = False
    alpha: Fraction | None = None
    centered: bool = False
    lr_decay: NonNegative | None = None
    initial_accumulator_value: NonNegative | None = None
    momentum_decay: NonNegative | None = None
    decoupled_weight_decay: bool = False
    rho: Fraction | None = None
    lambd: NonNegative | None = None
    t0: NonNegative | None = None
    etas: _Factors | None = None
    step_sizes: _Factors | None = None


@with_idle_keys("optimizer")
class OptimizerConfig(Section):
    """The optimizer. Without this section, the Trainer's own optimizer is used, or the one that
    the script passes.

    Attributes:
        type: Adam, AdamW, SGD, Adagrad, Lion, RMSprop, NAdam, RAdam, Adamax, Adadelta, ASGD, Rprop,
            Muon or Lamb, in any letter case. As in DeepSpeed, Adam means AdamW unless `adam_w_mode`
            is false. Muon leaves all but hidden matrices to AdamW.
            - Adam: AdamW, as in DeepSpeed, unless `adam_w_mode` is false.
            - AdamW: Adam with decoupled weight decay, like torch's AdamW.
            - Lion: Each update is the sign of a single moment, which takes 4 bytes per parameter
              less than Adam's two.
            - Muon: Muon updates hidden matrices, and AdamW the rest.
            - Lamb: Adam whose update of each tensor is scaled by the ratio of the norms of weight
              and update.
            - N: The class torch.optim.N, with its defaults.
    """

    type: Annotated[str, AfterValidator(_optimizer_type)]
    params: OptimizerParams = OptimizerParams()

    def contradictions(self, given: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, message) for settings that an optimizer of this type does not have.

        given: the names of all settings in the user's configuration."""
        kinds = {kind: optimizer_defaults(kind) for kind in TYPES}
        yield from _misplaced("optimizer", self.type, given, kinds)


class SchedulerParams(Settings):
    """The arguments of the schedule. A setting that the chosen type does not have is an error.

    Attributes:
        last_batch_iteration: The step from which the schedule continues. -1: the beginning.
        warmup_num_steps: Steps of the warm-up.
        warmup_type: How the rate rises.
            - log: The rate rises with the logarithm of the step.
            - linear: The rate rises linearly.
        warmup_min_lr: The first rate.
        warmup_max_lr: The rate after the warm-up. Default: the optimizer's; for WarmupDecayLR
            0.001.
        total_num_steps: The step at which the decay ends. Required.
        warmup_min_ratio: The first rate / the optimizer's.
        cos_min_ratio: The last rate / the optimizer's.
        lr_range_test_min_lr: The first rate.
        lr_range_test_step_size: Steps in an interval.
        lr_range_test_step_rate: Growth in an interval / the first rate.
        lr_range_test_staircase: Raise the rate only after each interval.
        cycle_min_lr: The lowest rate. Required.
        cycle_max_lr: The highest rate. Required.
        decay_lr_rate: Decay after the cycle, per `decay_step_size` steps.
        cycle_first_step_size: Steps in which the rate rises.
        cycle_second_step_size: Steps in which it falls. Default: the same.
        cycle_first_stair_count: Stairs in the rise. 0: linear.
        cycle_second_stair_count: Stairs in the fall. Default: the same.
        decay_step_size: Steps in an interval of the decay. 0: no decay.
        cycle_momentum: Vary the first of `betas` too, opposite to the rate. The second is set to
            0.99.
        cycle_min_mom: The lowest momentum.
        cycle_max_mom: The highest momentum.
        decay_mom_rate: Growth of the momentum after the cycle.
    """

    last_batch_iteration: Annotated[int, Field(ge=-1), WHOLE] = -1

    warmup_min_lr: Rates = key(0.0, auto="always 0")
    warmup_max_lr: Rates | None = key(None, auto="learning_rate")
    warmup_num_steps: Count = key(1000, auto="warmup_steps")
    warmup_type: Annotated[Literal["log", "linear"], AnyCase()] = "log"
    total_num_steps: Positive | None = key(
        None, auto="the steps that follow from max_steps or num_train_epochs"
    )
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


def _keys_like(*beginnings: str) -> tuple[str, ...]:
    names = (name for name in SchedulerParams.model_fields if name.startswith(beginnings))
    return *names, "last_batch_iteration"


_WARMUP_LR = _keys_like("warmup_num", "warmup_type", "warmup_min_lr", "warmup_max_lr")
# In the order of the arguments of DeepSpeed's classes.
SCHEDULE_KEYS = {
    "WarmupLR": _WARMUP_LR,
    "WarmupDecayLR": ("total_num_steps", *_WARMUP_LR),
    "WarmupCosineLR": tuple(
        "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type "
        "last_batch_iteration".split()
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
    pairs = zip(lows * (groups // len(lows)), highs * (groups // len(highs)), strict=False)
    return any(a > b for a, b in pairs)


class SchedulerConfig(Section):
    """The learning-rate schedule, with DeepSpeed's formulas. Without this section, the Trainer's
    own schedule is used.

    Attributes:
        type: The schedule, in any letter case.
            - WarmupLR: The rate rises for `warmup_num_steps` steps, then stays.
            - WarmupDecayLR: The rate rises for `warmup_num_steps` steps, then falls linearly to 0.
            - WarmupCosineLR: The rate rises for `warmup_num_steps` steps, then falls along a
              cosine.
            - OneCycle: The rate rises once from `cycle_min_lr` to `cycle_max_lr`, falls back, and
              may then decay.
            - LRRangeTest: The rate keeps rising, to find the largest one that works.
    """

    type: Annotated[
        Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"], AnyCase()
    ]
    params: SchedulerParams = SchedulerParams()

    def contradictions(self, given: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, message) for settings that are missing or misplaced.

        given: the names of all settings in the user's configuration, including those that are
            still "auto"."""
        for name in REQUIRED.get(self.type, ()):
            if self.params[name] is None and (name in self.params.keys() or name not in given):
                yield f"scheduler.params.{name}", f"is required by {self.type}"
        for low, high in _ORDERED:
            both_given = {low, high} <= self.params.model_fields_set
            if both_given and _exceeds(self.params[low], self.params[high]):
                message = f"{self.params[low]} is more than {high}, which is {self.params[high]}"
                yield f"scheduler.params.{low}", f"{message}; swap them"
        yield from _misplaced("scheduler", self.type, given, SCHEDULE_KEYS)


def _misplaced(
    section: str, kind: str, given: Collection[str], keys_of: Mapping[str, Collection[str]]
) -> Iterator[tuple[str, str]]:
    for name in sorted(set(given) - set(keys_of[kind])):
        owners = [other for other, keys in keys_of.items() if name in keys]
        message = (
            f"is a setting of {', '.join(owners)}, not of {kind}; change {section}.type or "
            "delete it"
        )
        yield f"{section}.params.{name}", message
