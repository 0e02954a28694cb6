"""`zero estimate`: what a training will take, as text or as a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers

from zero.config import Config
from zero.tools.estimate.machine import DEVICE, DISK, HOST, PAGEABLE, PINNED
from zero.tools.estimate.model import build, class_of, read_config
from zero.tools.estimate.parts import TILES
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import Estimate, estimate, fill_in
from zero.tools.estimate.remedies import Remedy, can_checkpoint, fits, remedies
from zero.tools.estimate.traffic import ASSUMPTION

_PLACES = {DEVICE: "on a device", HOST: "into host memory"}


def report(
    source: str, config: Config, question: Question, limits: Mapping[str, int], as_json: bool
) -> str:
    """The estimate. `limits`: bytes that a process has, by place ("device", "host").

    Raises ValueError for a model that cannot be read.
    """
    shape = read_config(source)
    config = fill_in(config, shape)
    model = build(shape, config.compute_dtype)
    found, other = estimate(model, config, question), None
    if can_checkpoint(model, question):
        other = estimate(model, config, replace(question, checkpointing=not question.checkpointing))
    better = [] if fits(found, limits) else remedies(model, config, question, limits)
    answer = _Answer(shape, config, question, limits, found, other, better)
    return json.dumps(answer.facts(), indent=2) if as_json else "\n".join(answer.lines(source))


@dataclass(frozen=True)
class _Answer:
    """Attributes: found: as it was asked; other: with gradient checkpointing if `found` is without,
    and vice versa.
    """

    shape: transformers.PretrainedConfig
    config: Config
    question: Question
    limits: Mapping[str, int]
    found: Estimate
    other: Estimate | None
    better: list[Remedy]

    def facts(self) -> dict[str, Any]:
        found, with_it = self.found, self.question.checkpointing
        both = {with_it: found, not with_it: self.other}
        return {
            "class": class_of(self.shape)[0].__name__,
            "elements": found.elements,
            "bytes": found.parts,
            "pinned": pinned(found, self.config),
            "traffic": found.traffic.links,
            "operations": found.traffic.operations,
            "seconds": found.traffic.seconds,
            "without_checkpointing": None if both[False] is None else _brief(both[False]),
            "with_checkpointing": None if both[True] is None else _brief(both[True]),
            "fits": fits(found, self.limits),
            "remedies": [{"change": each.words} | _brief(each.found) for each in self.better],
        }

    def lines(self, source: str) -> list[str]:
        lines, (kind, is_named), found = [], class_of(self.shape), self.found
        if not is_named:
            lines.append(
                "architectures names no class of transformers; by its model_type this is a "
                f"{kind.__name__}"
            )
        world = self.question.world_size
        ranks = "1 rank, which" if world == 1 else f"{world} ranks, each of them"
        lines.append(f"{source}: {found.elements:,} parameters, {ranks} holds at most:")
        lines += _table(found.parts)
        if host := found.total(HOST):
            locked = pinned(found, self.config)
            lines.append(
                f"Of the host memory {_size(locked)} are pinned, and {_size(host - locked)} are "
                "pageable."
            )
        if not self.question.batch:
            lines.append("Activations are not included: give --batch and --seq.")
        if self.other is not None:
            lines.append(self._other_way(self.other))
        if moved := _table(found.traffic.links):
            steps = self.config.gradient_accumulation_steps or 1
            lines += [f"Each rank moves in a step (micro-batches: {steps}):", *moved]
        return lines + self._verdict()

    def _other_way(self, other: Estimate) -> str:
        found, word = self.found, "Without" if self.question.checkpointing else "With"
        pairs = [
            (_size(other.total(DEVICE)), _size(found.total(DEVICE)), "{} on the device"),
            (_size(other.activations), _size(found.activations), "activations at most {}"),
            (f"{_seconds(other)} s", f"{_seconds(found)} s", "{} a step"),
        ]
        texts = [
            words.format(there if there == here else f"{there} instead of {here}")
            for there, here, words in pairs
        ]
        return f"{word} gradient checkpointing: {', '.join(texts)}."

    def _verdict(self) -> list[str]:
        """Whether it fits, and what to change; the assumed speeds, wherever seconds are named."""
        lines, is_enough = [], fits(self.found, self.limits)
        if self.limits and is_enough:
            sizes = " and ".join(
                f"{_PLACES[place]} of {_size(most)}" for place, most in self.limits.items()
            )
            lines.append(
                f"This fits {sizes}{'' if self.question.batch else ', without activations'}."
            )
        for place, most in self.limits.items():
            if (parts := self.found.parts[place]) and self.found.total(place) > most:
                largest = max(parts, key=lambda part: parts[part])
                lines.append(
                    f"This does not fit {_PLACES[place]} of {_size(most)}; the largest part: "
                    f"{largest}."
                )
        lines += [f"  fits with {_described(each)}" for each in self.better]
        if not is_enough and not self.better:
            words = "no change of stage, offload, micro-batch or checkpointing is enough"
            lines.append(f"  {words}: take shorter sequences, or more ranks")
        elif self.better or self.other is not None:
            lines.append(f"  {ASSUMPTION}")
        return lines


def pinned(found: Estimate, config: Config) -> int:
    """Bytes of the host memory that is pinned (page-locked) where there is an accelerator.

    The rest is pageable.
    """
    zero = config.zero_optimization
    weights = bool(zero.offload_param and zero.offloads_params and zero.offload_param.pin_memory)
    optimizer = bool(
        zero.offload_optimizer and zero.offloads_optimizer and zero.offload_optimizer.pin_memory
    )
    pins = {"parameters": weights, "activations": True, PINNED: True, PAGEABLE: False, TILES: False}
    return sum(nbytes for part, nbytes in found.parts[HOST].items() if pins.get(part, optimizer))


def _brief(found: Estimate) -> dict[str, Any]:
    totals = {place: found.total(place) for place in found.parts}
    return totals | {"activations": found.activations, "seconds": found.traffic.seconds}


def _described(remedy: Remedy) -> str:
    found, sizes = remedy.found, [_size(remedy.found.total(DEVICE))]
    for place, words in ((HOST, "of host memory"), (DISK, "on disk")):
        if nbytes := found.total(place):
            sizes.append(f"{_size(nbytes)} {words}")
    return f"{remedy.words}: {' and '.join(sizes)}, {_seconds(found)} s a step"


def _table(parts: Mapping[str, Mapping[str, int]]) -> list[str]:
    lines = []
    for place, of_place in parts.items():
        if of_place:
            lines.append(f"  {place:<16}{_size(sum(of_place.values())):>12}")
            lines += [
                f"    {part:<38}{_size(nbytes):>12}"
                for part, nbytes in sorted(of_place.items(), key=lambda p: -p[1])
            ]
    return lines


def _seconds(found: Estimate) -> str:
    return f"{float(f'{found.traffic.seconds:.1e}'):g}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"
