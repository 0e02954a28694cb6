"""What to change where a training does not fit, for `zero estimate`: the change with the fastest
step comes first.

A slower change is named, too, if it needs less memory or fewer settings than all that are faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from zero.config import Config
from zero.config.settings import ZeroConfig
from zero.tools.estimate.machine import DEVICE, HOST
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import Estimate, estimate

# At most so many remedies are named, of which those with fewer settings come first. What is named
# for its memory has at most this part of that of the others.
MOST, LESS = 5, 0.9
# Steps of `ratio` between nothing and all of the optimizer.
RATIOS = 20


class Change(NamedTuple):
    """Keys of zero_optimization to set, and words for that."""

    words: str
    keys: dict[str, Any]

    def applied(self, config: Config) -> Config:
        zero = config.zero_optimization
        keys = zero.model_dump(exclude_unset=True) | self.keys
        return config.model_copy(update={"zero_optimization": ZeroConfig.model_validate(keys)})

    def settings(self, config: Config) -> int:
        """How many of the keys have another value now."""
        before, after = config.zero_optimization, self.applied(config).zero_optimization
        return sum(getattr(before, key) != getattr(after, key) for key in self.keys)

    def with_ratio(self, ratio: float) -> Change:
        optimizer = self.keys["offload_optimizer"] | {"ratio": ratio}
        return Change(
            f"{self.words} (ratio {ratio:g})", self.keys | {"offload_optimizer": optimizer}
        )


class Remedy(NamedTuple):
    """A change in words, what is estimated with it, and how many settings it changes."""

    words: str
    found: Estimate
    settings: int

    @property
    def rank(self) -> tuple[float, int]:
        """By time; where that differs by less than the assumptions are worth, by the number of
        settings.
        """
        return float(f"{self.found.traffic.seconds:.1e}"), self.settings


def fits(found: Estimate, limits: Mapping[str, int]) -> bool:
    """Whether there is room. `limits`: bytes by place ("device", "host")."""
    return all(found.total(place) <= most for place, most in limits.items())


def remedies(
    model: nn.Module, config: Config, question: Question, limits: Mapping[str, int]
) -> list[Remedy]:
    """Changes after which there is room, ordered by the predicted time of a step.

    Stage, offload and its ratio are changed, with and without gradient checkpointing, and with
    micro-batches of half the size, a quarter and so on. The step keeps its number of sequences."""
    found = []
    modes = {question.checkpointing, question.checkpointing or can_checkpoint(model, question)}
    for checkpointing in sorted(modes):
        left = list(_changes(config.zero_optimization, HOST in limits))
        for batch in _halves(question.batch):
            words, given = [], config
            if batch != question.batch:
                steps = (config.gradient_accumulation_steps or 1) * question.batch // batch
                given = config.model_copy(update={"gradient_accumulation_steps": steps})
                words.append(f"micro-batch {batch}, gradient_accumulation_steps {steps}")
            if checkpointing and not question.checkpointing:
                words.append("gradient checkpointing")
            asked = replace(question, batch=batch, checkpointing=checkpointing)
            for change in left.copy():
                for tried, result in _tried(model, given, asked, limits, change):
                    if fits(result, limits):
                        all_words = " and ".join(filter(None, [tried.words, *words]))
                        found.append(Remedy(all_words, result, tried.settings(config) + len(words)))
                        if tried is change:  # with smaller micro-batches it would be slower
                            left.remove(change)
    return _undominated(found, limits)


def can_checkpoint(model: nn.Module, question: Question) -> bool:
    """Whether activations are counted, and the model has gradient checkpointing."""
    return bool(question.batch and model.supports_gradient_checkpointing)


def _halves(batch: int) -> Iterator[int]:
    """The size, its half and so on, as long as that is whole, then 1."""
    yield batch
    while batch > 1:
        batch = batch // 2 if batch % 2 == 0 else 1
        yield batch


def _changes(zero: ZeroConfig, host_is_limited: bool) -> Iterator[Change]:
    """What may be changed, at first nothing. Files are a remedy for too little host memory only."""
    three, few = {"stage": 3}, {"stage3_max_live_parameters": 0}
    at_three = "zero_optimization.stage 3 with " if zero.stage < 3 else ""
    yield Change("", {})
    if zero.offloads_optimizer or zero.offloads_params:
        off = {"device": "none"}
        yield Change("no offload", {"offload_optimizer": off, "offload_param": off})
    for stage in range(zero.stage + 1, 4):
        yield Change(f"zero_optimization.stage {stage}", {"stage": stage})
    yield Change(f"{at_three}stage3_max_live_parameters 0", three | few)
    places = ("cpu", "nvme") if host_is_limited else ("cpu",)
    for place in places:
        optimizer, words = (
            {"offload_optimizer": _section(zero, place)},
            f"the optimizer offloaded to {place}",
        )
        if zero.stage in (1, 2):
            yield Change(words, optimizer)
        if zero.stage == 0:
            yield Change(f"zero_optimization.stage 2 with {words}", {"stage": 2} | optimizer)
        yield Change(f"{at_three}{words}", three | optimizer)
        for weights in places[: places.index(place) + 1]:
            param = {
                "offload_param": _section(zero, weights)
                | ({"max_in_cpu": 0} if weights == "nvme" else {})
            }
            words = (
                f"the optimizer offloaded to {place}, parameters to {weights}, "
                "stage3_max_live_parameters 0"
            )
            yield Change(f"{at_three}{words}", three | few | optimizer | param)


def _section(zero: ZeroConfig, device: str) -> dict[str, Any]:
    known = [
        each.nvme_path
        for each in (zero.offload_optimizer, zero.offload_param)
        if each and each.nvme_path
    ]
    return {"device": device, "pin_memory": True} | (
        {"nvme_path": (known or ["."])[0]} if device == "nvme" else {}
    )


def _tried(
    model: nn.Module, config: Config, question: Question, limits: Mapping[str, int], change: Change
) -> Iterator[tuple[Change, Estimate]]:
    """The change, and if it offloads the optimizer the smallest `ratio` above 0 with which the
    device has room.
    """

    def asked(each: Change) -> Estimate:
        return estimate(model, each.applied(config), question)

    found = asked(change)
    yield change, found
    most = limits.get(DEVICE, 0)
    divides = change.keys.get("offload_optimizer", {}).get("device", "none") != "none"
    if (
        not divides
        or found.total(DEVICE) > most
        or asked(change.with_ratio(0)).total(DEVICE) <= most
    ):
        return
    low, high = 0, RATIOS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if asked(change.with_ratio(middle / RATIOS)).total(DEVICE) <= most
            else (middle, high)
        )
    if high < RATIOS:
        yield (best := change.with_ratio(high / RATIOS)), asked(best)


def _undominated(found: Sequence[Remedy], limits: Mapping[str, int]) -> list[Remedy]:
    """Those that need fewer settings than all faster ones, and as many of those that need less
    memory as are named.
    """
    simpler, smaller, least, fewest = [], [], math.inf, math.inf
    for remedy in sorted(found, key=lambda remedy: remedy.rank):
        fullest = max(remedy.found.total(place) / most for place, most in limits.items())
        if remedy.settings < fewest:
            simpler.append(remedy)
        elif fullest <= LESS * least:
            smaller.append(remedy)
        else:
            continue
        least, fewest = min(least, fullest), min(fewest, remedy.settings)
    named = simpler + smaller[: max(0, MOST - len(simpler))]
    return sorted(named, key=lambda remedy: remedy.rank)
