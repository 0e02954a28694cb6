"""Finds changes for a training run that does not fit, or that would also fit without its offload.
The change with the fastest step comes first.

A slower change is also named if it needs less memory or fewer settings than all faster ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from zero.config import Config
from zero.config.settings import ZeroConfig
from zero.errors import UsageError
from zero.tools.estimate.machine import DEVICE, DISK, HOST
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import Estimate, estimate

# The largest number of remedies that are named. A slower one is named for its memory only if it
# needs at most this fraction of the others' memory.
MOST, LESS = 5, 0.9
# The number of steps of `ratio` between nothing and the whole optimizer.
RATIOS = 20
# The numbers of slices of a batch that are tried. Trying more would take minutes.
SLICES = (4, 16, 64)
# Twice the micro-batch has at least twice the activations, divided by this.
GROWTH = 1.2
# A change is named for its speed if a step takes less than this fraction of the time.
FASTER = 0.95
NO_OFFLOAD = {"device": "none"}


class Change(NamedTuple):
    """A change in words, the keys of zero_optimization and of bf16 to set, what it costs apart from
    time, and the number of slices in which each block runs its batch.
    """

    words: str
    keys: dict[str, Any]
    bf16: dict[str, Any] = {}
    price: str = ""
    slices: int | None = None

    def applied(self, config: Config) -> Config:
        zero = config.zero_optimization.model_dump(exclude_unset=True) | self.keys
        sections = {
            "zero_optimization": ZeroConfig.model_validate(zero),
            "bf16": config.bf16.model_copy(update=self.bf16),
        }
        if self.slices:
            activations = config.activation_checkpointing
            sections["activation_checkpointing"] = activations.model_copy(
                update={"batch_slices": self.slices}
            )
        return config.model_copy(update=sections)

    def in_slices(self, slices: int) -> Change:
        """Return the change with slices instead of micro-batches."""
        prices = self.price, "activations are computed twice"
        return self._replace(price=", ".join(filter(None, prices)), slices=slices)

    def moves_with_each_micro_batch(self, config: Config, ranks: int) -> bool:
        """Whether parameters or gradients are copied or sent again for each micro-batch."""
        zero = self.applied(config).zero_optimization
        return zero.offloads_optimizer or zero.offloads_params or (zero.stage == 3 and ranks > 1)

    def settings(self, config: Config) -> int:
        """Return how many of the keys now have a different value."""
        after = self.applied(config)
        return sum(
            getattr(getattr(config, section), key) != getattr(getattr(after, section), key)
            for section, keys in (("zero_optimization", self.keys), ("bf16", self.bf16))
            for key in keys
        )

    @property
    def divides(self) -> bool:
        """Whether a part of the optimizer may stay on the device."""
        return self.keys.get("offload_optimizer", NO_OFFLOAD) != NO_OFFLOAD and not self.price

    def with_ratio(self, ratio: float) -> Change:
        optimizer = self.keys["offload_optimizer"] | {"ratio": ratio}
        keys = self.keys | {"offload_optimizer": optimizer}
        return self._replace(words=f"{self.words} (ratio {ratio:g})", keys=keys)


class Remedy(NamedTuple):
    """A change in words, the estimate with it, how many settings it changes, what it costs apart
    from time, and its keys with the micro-batch and checkpointing with which it was tried.
    """

    words: str
    found: Estimate
    settings: int
    price: str = ""
    change: Change = Change("", {})
    question: Question = Question(1)

    @property
    def rank(self) -> tuple[float, int]:
        """Order by time, or by the number of settings if the times differ by less than the
        assumptions allow.
        """
        return float(f"{self.found.seconds:.1e}"), self.settings


def fits(found: Estimate, limits: Mapping[str, int]) -> bool:
    """Whether it fits. `limits`: bytes by place ("device", "host")."""
    return all(found.total(place) <= most for place, most in limits.items())


def remedies(
    model: nn.Module, config: Config, question: Question, limits: Mapping[str, int]
) -> list[Remedy]:
    """Return the changes with which it fits, ordered by the predicted time of a step.

    Stage, offload and its ratio are changed, with and without gradient checkpointing, and with
    micro-batches of half the size, a quarter and so on. The step keeps its number of sequences.
    Less precise states are tried only if nothing else in memory is enough."""
    return Search(model, config, question, limits).remedies()


def faster(
    model: nn.Module, config: Config, question: Question, limits: Mapping[str, int], now: Estimate
) -> Remedy | None:
    """Return the fastest change to less offload or sharding, or to slices instead of micro-batches,
    that fits and makes a step faster than `now`. None if there is none, or if the device's memory
    is not limited.
    """
    if DEVICE not in limits:
        return None
    search, found = Search(model, config, question, limits), []
    for change in _unneeded(config.zero_optimization):
        tried = estimate(model, change.applied(config), question)
        if fits(tried, limits):
            settings = change.settings(config)
            found.append(Remedy(change.words, tried, settings, question=question))
    found += search.in_slices(Change("", {}))
    best = min(found, key=lambda remedy: remedy.rank, default=None)
    return best if best and best.found.seconds < FASTER * now.seconds else None


def _unneeded(zero: ZeroConfig) -> Iterator[Change]:
    """Return what could be left out, each with a clause that says so."""
    off = {"offload_optimizer": NO_OFFLOAD, "offload_param": NO_OFFLOAD}
    if zero.offloads_optimizer or zero.offloads_params:
        yield Change("offload is not needed", off)
    if zero.offloads_optimizer and zero.offloads_params:
        yield Change("offload of parameters is not needed", {"offload_param": NO_OFFLOAD})
    for stage in range(zero.stage):
        yield Change(f"stage {stage} without offload is enough", off | {"stage": stage})


class Search:
    """Searches changes and micro-batches that fit, with and without gradient checkpointing."""

    def __init__(
        self, model: nn.Module, config: Config, question: Question, limits: Mapping[str, int]
    ):
        self._model = model
        self._config = config
        self._question = question
        self._limits = limits
        self._estimates: dict[tuple[str, int | None, int, bool], Estimate | None] = {}

    def remedies(self) -> list[Remedy]:
        """See the function of this name."""
        found = list(self._enough(_changes(self._config.zero_optimization, HOST in self._limits)))
        best = _undominated(found, self._limits)
        if not any(remedy.found.total(DISK) == 0 for remedy in found):
            best += _undominated(list(self._enough(_less_precise(self._config))), self._limits)
        return sorted(best, key=lambda remedy: remedy.rank)

    def too_large(self) -> Iterator[Remedy]:
        """After `remedies`: return the changes that do not fit even with the smallest micro-batch,
        each of which needs less device memory than those before it.
        """
        asked, least = self._question, math.inf
        batch = list(_halves(asked.batch))[-1]
        checkpointing = asked.checkpointing or can_checkpoint(self._model, asked)
        for change in _changes(self._config.zero_optimization, HOST in self._limits):
            found = self._estimate(change, batch, checkpointing)
            if found and not fits(found, self._limits) and found.total(DEVICE) < least:
                least = found.total(DEVICE)
                yield self._remedy(change, found, batch, checkpointing)

    def _enough(self, changes: Iterable[Change]) -> Iterator[Remedy]:
        """Return the changes that fit, each with the largest micro-batch that fits. A change that
        takes too much with the smallest one is not tried any further.
        """
        asked = self._question
        batches = list(_halves(asked.batch))
        least = asked.checkpointing or can_checkpoint(self._model, asked)
        for change in changes:
            if not self._may_fit(change, batches[-1], batches[-1], least):
                continue
            largest = 0
            for checkpointing in sorted({asked.checkpointing, least}):
                for batch in batches:
                    if not self._may_fit(change, batch, batches[-1], checkpointing):
                        continue
                    fitting = list(self._with_room(change, batch, checkpointing))
                    yield from fitting
                    if any(remedy.change is change for remedy in fitting):
                        largest = max(largest, batch)
                        break  # with smaller micro-batches it would be slower
            if largest < _sequences(self._config, asked):
                yield from self.in_slices(change)

    def in_slices(self, change: Change) -> Iterator[Remedy]:
        """Return the change with one micro-batch of all sequences of a step, in the fewest slices
        that fit: at most one remedy.
        """
        whole = _sequences(self._config, self._question)
        if self._config.activation_checkpointing.batch_slices is not None or whole < 2:
            return
        if not change.moves_with_each_micro_batch(self._config, self._question.world_size):
            return
        for slices in sorted({min(each, whole) for each in SLICES}):
            if fitting := list(self._with_room(change.in_slices(slices), whole, False)):
                yield from fitting
                return

    def _may_fit(self, change: Change, batch: int, smallest: int, checkpointing: bool) -> bool:
        """Whether it is worth an estimate, judged by the one with the smallest micro-batch, because
        activations grow with the micro-batch. A part of the optimizer may move back from host
        memory to the device, where it takes the same amount.
        """
        found = self._estimate(change, smallest, checkpointing)
        if found is None:
            return False
        excess = max(0, found.total(HOST) - self._limits.get(HOST, math.inf))
        if excess and not change.divides:
            return False
        growth = (batch / smallest - 1) * found.activations if smallest else 0
        most = self._limits.get(DEVICE, math.inf)
        return found.total(DEVICE) + excess + growth / GROWTH <= most

    def _with_room(self, change: Change, batch: int, checkpointing: bool) -> Iterator[Remedy]:
        for tried in self._tried(change, batch, checkpointing):
            found = self._estimate(tried, batch, checkpointing)
            if found is not None and fits(found, self._limits):
                yield self._remedy(tried, found, batch, checkpointing)

    def _tried(self, change: Change, batch: int, checkpointing: bool) -> Iterator[Change]:
        """Return the change; if it offloads the optimizer, with the smallest `ratio` above 0 that
        fits on the device.
        """
        most = self._limits.get(DEVICE, 0)

        def used(part: int) -> float:
            """Return the device's bytes with `part` / `RATIOS` of the optimizer offloaded."""
            tried = change if part == RATIOS else change.with_ratio(part / RATIOS)
            found = self._estimate(tried, batch, checkpointing)
            return math.inf if found is None else found.total(DEVICE)

        yield change
        if not change.divides or used(RATIOS) > most or used(0) <= most:
            return
        # Nearly linear, except for whole blocks: start where a line would meet the limit.
        part = math.ceil(RATIOS * (used(0) - most) / (used(0) - used(RATIOS)))
        while used(part) > most:
            part += 1
        while used(part - 1) <= most:
            part -= 1
        if part < RATIOS:
            yield change.with_ratio(part / RATIOS)

    def _estimate(self, change: Change, batch: int, checkpointing: bool) -> Estimate | None:
        """None if the engine refuses the change in combination with other keys."""
        key = change.words, change.slices, batch, checkpointing
        if key not in self._estimates:
            question = replace(self._question, batch=batch, checkpointing=checkpointing)
            given = self._config.model_copy(
                update={"gradient_accumulation_steps": self._steps(batch)}
            )
            try:
                self._estimates[key] = estimate(self._model, change.applied(given), question)
            except UsageError:
                self._estimates[key] = None
        return self._estimates[key]

    def _steps(self, batch: int) -> int | None:
        """Return the micro-batches of a step, which keeps its number of sequences."""
        steps, asked = self._config.gradient_accumulation_steps, self._question.batch
        return steps if batch == asked else _sequences(self._config, self._question) // batch

    def _remedy(self, change: Change, found: Estimate, batch: int, checkpointing: bool) -> Remedy:
        words, prices = [change.words], [change.price]
        if batch != self._question.batch or change.slices:
            slices = f" in batch_slices {change.slices}" if change.slices else ""
            steps = self._steps(batch)
            words.append(f"micro-batch {batch}{slices}, gradient_accumulation_steps {steps}")
        if checkpointing and not self._question.checkpointing:
            words.append("gradient checkpointing")
            prices.append("activations are computed twice")
        return Remedy(
            " and ".join(filter(None, words)),
            found,
            change.settings(self._config) + len(words) - 1,
            ", ".join(filter(None, prices)),
            change,
            replace(self._question, batch=batch, checkpointing=checkpointing),
        )


def can_checkpoint(model: nn.Module, question: Question) -> bool:
    """Whether activations are counted, and the model has gradient checkpointing."""
    return bool(question.batch and model.supports_gradient_checkpointing)


def _sequences(config: Config, question: Question) -> int:
    """Return the number for a step on one rank."""
    return question.batch * (config.gradient_accumulation_steps or 1)


def _halves(batch: int) -> Iterator[int]:
    """Return the size, its half and so on while that is an integer, and finally 1."""
    yield batch
    while batch > 1:
        batch = batch // 2 if batch % 2 == 0 else 1
        yield batch


def _changes(zero: ZeroConfig, host_is_limited: bool) -> Iterator[Change]:
    """Return what may be changed, starting with nothing. Files only help against too little host
    memory.
    """
    three, few = {"stage": 3}, {"stage3_max_live_parameters": 0}
    at_three = "zero_optimization.stage 3 with " if zero.stage < 3 else ""
    yield Change("", {})
    if zero.offloads_optimizer or zero.offloads_params:
        off = {"offload_optimizer": NO_OFFLOAD, "offload_param": NO_OFFLOAD}
        yield Change("no offload", off)
    for stage in range(zero.stage + 1, 4):
        yield Change(f"zero_optimization.stage {stage}", {"stage": stage})
    yield Change(f"{at_three}stage3_max_live_parameters 0", three | few)
    places = ("cpu", "nvme") if host_is_limited else ("cpu",)
    for place in places:
        optimizer = {"offload_optimizer": _section(zero, place)}
        words = f"the optimizer offloaded to {place}"
        if zero.stage in (1, 2):
            yield Change(words, optimizer)
        if zero.stage == 0:
            yield Change(f"zero_optimization.stage 2 with {words}", {"stage": 2} | optimizer)
        yield Change(f"{at_three}{words}", three | optimizer)
        for weights in places[: places.index(place) + 1]:
            section = _section(zero, weights)
            if weights == "nvme":
                section["max_in_cpu"] = 0
            words = (
                f"the optimizer offloaded to {place}, parameters to {weights}, "
                "stage3_max_live_parameters 0"
            )
            yield Change(f"{at_three}{words}", three | few | optimizer | {"offload_param": section})


def _less_precise(config: Config) -> Iterator[Change]:
    """Everything in host memory, in fewer bytes. The engine refuses this unless the optimizer is
    Adam.
    """
    zero = config.zero_optimization
    keys = {"stage": 3, "stage3_max_live_parameters": 0, "zero_quantized_moments": True}
    keys |= {f"offload_{part}": _section(zero, "cpu") for part in ("optimizer", "param")}
    at_three = "zero_optimization.stage 3 with " if zero.stage < 3 else ""
    words = (
        f"{at_three}the optimizer offloaded to cpu, parameters to cpu, "
        "stage3_max_live_parameters 0, zero_quantized_moments"
    )
    coded = "the optimizer's moments have 8 bits"
    yield Change(words, keys, price=coded)
    if config.bf16.enabled:
        yield Change(
            f"{words}, bf16.bf16_master_weights_and_grads",
            keys,
            {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": False},
            f"{coded}, and without fp32 masters updates are rounded up or down at random",
        )


def _section(zero: ZeroConfig, device: str) -> dict[str, Any]:
    section = {"device": device, "pin_memory": True}
    if device == "nvme":
        known = [each.nvme_path for each in (zero.offload_optimizer, zero.offload_param) if each]
        section["nvme_path"] = next(filter(None, known), ".")
    return section


def _undominated(found: Sequence[Remedy], limits: Mapping[str, int]) -> list[Remedy]:
    """Keep those that need fewer settings than all faster ones, and of those that need less memory
    as many as may be named.
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
