"""Finds changes for a training run that does not fit, or that would also fit without its offload.
The change with the fastest step comes first.

A slower change is also named if it needs less memory than all faster ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from zero.config import Config
from zero.config.settings import ZeroConfig
from zero.errors import UsageError
from zero.tools.estimate.machine import DEVICE, HOST
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import Estimate, estimate, estimate_both_ways

# The largest number of remedies that are named. A slower one is named if it needs at most this
# fraction of the others' memory.
MOST, LESS = 5, 0.9
# Twice the micro-batch has at least twice the activations, divided by this.
GROWTH = 1.2
# A change is named for its speed if a step takes less than this fraction of the time.
FASTER = 0.95
NO_OFFLOAD = {"device": "none"}
IN_MEMORY = {"offload_optimizer": NO_OFFLOAD, "offload_param": NO_OFFLOAD}


class Change(NamedTuple):
    """A change in words, and the keys of `zero_optimization` to set."""

    words: str = ""
    keys: dict[str, Any] = {}

    def applied(self, config: Config) -> Config:
        given = config.zero_optimization.model_dump(exclude_unset=True)
        zero = ZeroConfig.model_validate(given | self.keys)
        return config.model_copy(update={"zero_optimization": zero})


class Remedy(NamedTuple):
    """A change with the micro-batch and checkpointing with which it was tried, all of it in words,
    and the estimate.
    """

    words: str
    found: Estimate
    change: Change = Change()
    question: Question = Question(1)

    @property
    def seconds(self) -> float:
        """The time of a step with two digits. Smaller differences are less than what is assumed."""
        return float(f"{self.found.seconds:.1e}")


class Search:
    """Searches changes and micro-batches that fit, with and without gradient checkpointing.

    Args:
        limits: bytes by place ("device", "host").

    Stage and offload are changed, and micro-batches have half the size, a quarter and so on. A step
    keeps its number of sequences.
    """

    def __init__(
        self, model: nn.Module, config: Config, question: Question, limits: Mapping[str, int]
    ):
        self._model = model
        self.config = config
        self.question = question
        self.limits = limits
        self._estimates: dict[tuple[str, int, bool], Estimate | None] = {}
        self._batches = list(_halves(question.batch))
        # The number of sequences for a step on one rank.
        self._sequences = question.batch * (config.gradient_accumulation_steps or 1)
        can_checkpoint = question.batch and model.supports_gradient_checkpointing
        self._can_checkpoint = question.checkpointing or bool(can_checkpoint)

    @cached_property
    def both_ways(self) -> tuple[Estimate, Estimate | None]:
        """The run as asked for, and the same with gradient checkpointing if it was asked for
        without, and vice versa. None if activations are not counted, or the model has no
        checkpointing.

        Raises UsageError as `estimate` does.
        """
        asked, other = self.question, None
        if not (asked.batch and self._model.supports_gradient_checkpointing):
            found = estimate(self._model, self.config, asked)
        elif self.config.activation_checkpointing.model_fields_set:
            # The engine keeps buffers that activations were in, and slices are only probed once.
            found = estimate(self._model, self.config, asked)
            other = self._estimate(Change(), asked.batch, not asked.checkpointing)
        else:
            found, other = estimate_both_ways(self._model, self.config, asked)
        self._estimates["", asked.batch, asked.checkpointing] = found
        if other is not None:
            self._estimates["", asked.batch, not asked.checkpointing] = other
        return found, other

    def fits(self, found: Estimate) -> bool:
        return all(found.total(place) <= most for place, most in self.limits.items())

    def remedies(self) -> list[Remedy]:
        """Return the changes with which it fits, ordered by the predicted time of a step."""
        changes = _changes(self.config.zero_optimization, HOST in self.limits)
        return _undominated(self._enough(changes), self.limits)

    def faster(self) -> Remedy | None:
        """Return the fastest change to less offload or sharding that fits and makes a step faster
        than it was asked for. None if there is none, or if the device's memory is not limited.
        """
        if DEVICE not in self.limits:
            return None
        batch, checkpointing = self.question.batch, self.question.checkpointing
        unneeded = _unneeded(self.config.zero_optimization)
        tried = [self._tried(change, batch, checkpointing) for change in unneeded]
        found = [remedy for remedy in tried if remedy and self.fits(remedy.found)]
        best = min(found, key=lambda remedy: remedy.seconds, default=None)
        now = self.both_ways[0].seconds
        return best if best and best.found.seconds < FASTER * now else None

    def _enough(self, changes: Iterable[Change]) -> Iterator[Remedy]:
        """Return the changes that fit, each with the largest micro-batch that fits. A change that
        takes too much with the smallest one is not tried any further.
        """
        for change in changes:
            if not self._may_fit(change, self._batches[-1], self._can_checkpoint):
                continue
            for checkpointing in sorted({self.question.checkpointing, self._can_checkpoint}):
                for batch in self._batches:
                    if not self._may_fit(change, batch, checkpointing):
                        continue
                    tried = self._tried(change, batch, checkpointing)
                    if tried and self.fits(tried.found):
                        yield tried
                        break  # with smaller micro-batches it would be slower

    def _may_fit(self, change: Change, batch: int, checkpointing: bool) -> bool:
        """Whether it is worth an estimate, judged by the one with the smallest micro-batch, because
        activations grow with the micro-batch.
        """
        smallest = self._batches[-1]
        found = self._estimate(change, smallest, checkpointing)
        if found is None or found.total(HOST) > self.limits.get(HOST, math.inf):
            return False
        growth = (batch / smallest - 1) * found.activations if smallest else 0
        return found.total(DEVICE) + growth / GROWTH <= self.limits.get(DEVICE, math.inf)

    def _estimate(self, change: Change, batch: int, checkpointing: bool) -> Estimate | None:
        """None if the engine refuses the change in combination with other keys."""
        key = change.words, batch, checkpointing
        if key not in self._estimates:
            question = replace(self.question, batch=batch, checkpointing=checkpointing)
            steps = {"gradient_accumulation_steps": self._steps(batch)}
            config = self.config.model_copy(update=steps)
            try:
                self._estimates[key] = estimate(self._model, change.applied(config), question)
            except UsageError:
                self._estimates[key] = None
        return self._estimates[key]

    def _steps(self, batch: int) -> int | None:
        """Return the micro-batches of a step, which keeps its number of sequences."""
        is_asked = batch == self.question.batch
        return self.config.gradient_accumulation_steps if is_asked else self._sequences // batch

    def _tried(self, change: Change, batch: int, checkpointing: bool) -> Remedy | None:
        """Return the change with its estimate, whether it fits or not."""
        found, asked = self._estimate(change, batch, checkpointing), self.question
        if found is None:
            return None
        words = [change.words]
        if batch != asked.batch:
            steps = self._steps(batch)
            words.append(f"micro-batch {batch}, gradient_accumulation_steps {steps}")
        if checkpointing and not asked.checkpointing:
            words.append("gradient checkpointing")
        return Remedy(
            " and ".join(filter(None, words)),
            found,
            change,
            replace(asked, batch=batch, checkpointing=checkpointing),
        )


def _halves(batch: int) -> Iterator[int]:
    """Return the size, its half and so on while that is an integer, and finally 1."""
    yield batch
    while batch > 1:
        batch = batch // 2 if batch % 2 == 0 else 1
        yield batch


def _unneeded(zero: ZeroConfig) -> Iterator[Change]:
    """Return what could be left out, each with a clause that says so."""
    if zero.offloads_optimizer or zero.offloads_params:
        yield Change("offload is not needed", IN_MEMORY)
    if zero.offloads_optimizer and zero.offloads_params:
        yield Change("offload of parameters is not needed", {"offload_param": NO_OFFLOAD})
    for stage in range(zero.stage):
        yield Change(f"stage {stage} without offload is enough", IN_MEMORY | {"stage": stage})


def _changes(zero: ZeroConfig, host_is_limited: bool) -> Iterator[Change]:
    """Return what may be changed, starting with nothing. Files only help against too little host
    memory.
    """
    three, few = {"stage": 3}, {"stage3_max_live_parameters": 0}
    at_three = "zero_optimization.stage 3 with " if zero.stage < 3 else ""
    yield Change()
    if zero.offloads_optimizer or zero.offloads_params:
        yield Change("no offload", IN_MEMORY)
    for stage in range(zero.stage + 1, 4):
        yield Change(f"zero_optimization.stage {stage}", {"stage": stage})
    yield Change(f"{at_three}stage3_max_live_parameters 0", three | few)
    places = ("cpu", "nvme") if host_is_limited else ("cpu",)
    for place in places:
        words, optimizer = f"the optimizer offloaded to {place}", _offload(zero, optimizer=place)
        if zero.stage in (1, 2):
            yield Change(words, optimizer)
        if zero.stage == 0:
            yield Change(f"zero_optimization.stage 2 with {words}", {"stage": 2} | optimizer)
        yield Change(f"{at_three}{words}", three | optimizer)
        for weights in places[: places.index(place) + 1]:
            yield Change(
                f"{at_three}the optimizer offloaded to {place}, parameters to {weights}, "
                "stage3_max_live_parameters 0",
                three | few | _offload(zero, optimizer=place, param=weights),
            )


def _offload(zero: ZeroConfig, **places: str) -> dict[str, Any]:
    """Return the sections that offload these parts, the optimizer or parameters, to a place."""
    sections: dict[str, Any] = {}
    for part, device in places.items():
        section = sections[f"offload_{part}"] = {"device": device, "pin_memory": True}
        if device == "nvme":
            known = [
                each.nvme_path for each in (zero.offload_optimizer, zero.offload_param) if each
            ]
            section["nvme_path"] = next(filter(None, known), ".")
            if part == "param":
                section["max_in_cpu"] = 0
    return sections


def _undominated(found: Iterable[Remedy], limits: Mapping[str, int]) -> list[Remedy]:
    """Keep those that need less memory than all faster ones. Of equally fast ones, the first is the
    one with the fewest settings.
    """
    named: list[Remedy] = []
    least = math.inf
    for remedy in sorted(found, key=lambda remedy: remedy.seconds):
        fullest = max(remedy.found.total(place) / most for place, most in limits.items())
        if fullest <= LESS * least:
            named.append(remedy)
            least = fullest
    return named[:MOST]
