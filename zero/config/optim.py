"""The sections ``optimizer`` and ``scheduler``: the available types, and the settings of each.
`optim.json` lists them.

``params`` is one section with the settings of all kinds, so that the message about a misspelt key
can name the right one. ``contradictions`` names the settings that the chosen kind does not have.
Settings that the user did not write are left to the optimizer or schedule. Their defaults are
DeepSpeed's. Nothing here creates an optimizer."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator

from zero.config import sources
from zero.config.idle import with_idle_keys
from zero.config.keys import AnyCase, Section

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("optim.json").read_text("utf-8"))
ELEMENTWISE: list[str] = _TABLE["element by element"]
TYPES = [*ELEMENTWISE, *_TABLE["whole tensors"]]
# In the order of the arguments of DeepSpeed's classes.
SCHEDULE_KEYS: dict[str, list[str]] = _TABLE["arguments of schedules"]


def why_refused(name: str, world_size: int) -> str | None:
    """The message for an optimizer class of this name if it cannot work on so many processes, else
    None.
    """
    for row in _TABLE["refused"]:
        if name.lower() in row["classes"] and world_size >= row["from processes"]:
            return f"{name} cannot be used: it {row['why']}; use another one, such as AdamW"
    return None


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
    """The keys of ``optimizer.params`` that an optimizer of this type has, with their defaults.

    Those of Muon are its matrices'. Other parameters have `adam_lr` 3e-4; see `zero.optim.muon`.
    """
    own = _TABLE["defaults"].get(kind) or sources.defaults(f"torch.optim.{kind.lower()}", kind)
    defaults = {key: tuple(v) if isinstance(v, list) else v for key, v in own.items()}
    if kind in ("Adam", "AdamW") and not torch_adam:
        # As in DeepSpeed: no weight decay by default.
        defaults["weight_decay"] = 0.0
    if kind == "Adam":
        # The same as adam_w_mode.
        del defaults["decoupled_weight_decay"]
    return dict.fromkeys(_TABLE["added by DeepSpeed"].get(kind, ())) | defaults


class Settings(Section):
    """Settings that are passed on with ``**``: what the user wrote and has an effect."""

    def keys(self) -> list[str]:
        return [name for name in sorted(self.model_fields_set) if "idle" not in self.about(name)]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@with_idle_keys("optimizer.params", acting=_TABLE["optimizer.params"])
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


@with_idle_keys("scheduler.params", acting=_TABLE["scheduler.params"])
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
        for name in _TABLE["required"].get(self.type, ()):
            if self.params[name] is None and (name in self.params.keys() or name not in given):
                yield f"scheduler.params.{name}", f"is required by {self.type}"
        for low, high in _TABLE["ordered"]:
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
