"""Prints what `zero estimate` has predicted, as text or as a JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import transformers

from zero.config import Config
from zero.errors import UsageError
from zero.monitor.out_of_memory import size
from zero.tools.estimate.machine import DEVICE, DISK, HOST
from zero.tools.estimate.model import build, class_of, read_config
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import Estimate, fill_in
from zero.tools.estimate.remedies import Remedy, Search
from zero.tools.estimate.teacher import Teacher

_PLACES = {DEVICE: "on a device", HOST: "into host memory"}


def report(
    source: str,
    shape: transformers.PretrainedConfig,
    config: Config,
    question: Question,
    limits: Mapping[str, int],
    as_json: bool,
    teacher: tuple[str, int | None] | None = None,
) -> str:
    """Return the estimate of the model in the folder `source`, whose configuration is `shape`.
    `limits`: the bytes available to a process, by place ("device", "host").
    `teacher`: the first arguments of `Teacher.read`.

    Raises ValueError for a model that cannot be read.
    """
    config = fill_in(config, shape)
    if teacher is not None:
        question = replace(question, teacher=Teacher.read(*teacher, config))
        if read_config(teacher[0]).is_encoder_decoder != shape.is_encoder_decoder:
            raise UsageError(
                f"--teacher {teacher[0]}: one of teacher and student is an encoder-decoder and the "
                "other is not, so they cannot be compared token by token; name two of one kind"
            )
    model = build(shape, config.compute_dtype, question.adapter)
    answer = _Answer(shape, Search(model, config, question, limits))
    return json.dumps(answer.facts(), indent=2) if as_json else "\n".join(answer.lines(source))


class _Answer:
    """An estimate and what could be changed.

    Attributes:
        found: the estimate as asked for.
        fits: whether it fits.
        other: the same with gradient checkpointing if `found` is without it, and vice versa.
        better: changes with which it fits, if it does not fit.
        unneeded: a change to less offload or sharding that also fits and is faster.
    """

    def __init__(self, shape: transformers.PretrainedConfig, search: Search):
        self.shape = shape
        self.config = search.config
        self.question = search.question
        self.limits = search.limits
        self.found, self.other = search.both_ways
        self.fits = search.fits(self.found)
        self.better = [] if self.fits else search.remedies()
        self.unneeded = search.faster() if self.fits else None

    def facts(self) -> dict[str, Any]:
        found, unneeded = self.found, self.unneeded
        both = [found, self.other] if self.question.checkpointing else [self.other, found]
        with_it, without = (each and _brief(each) for each in both)
        speeds, itemsize = self.question.speeds, self.config.compute_dtype.itemsize
        return {
            "class": class_of(self.shape)[0].__name__,
            "elements": found.elements,
            "bytes": found.parts,
            "host_memory_of_a_host": found.total(HOST) * self.question.per_host,
            "traffic": found.traffic.links,
            "operations": found.traffic.operations,
            "host_memory_of_updates": found.traffic.update.on_host,
            "speeds": asdict(speeds),
            "parts_of_a_step": found.traffic.parts(speeds, itemsize),
            "seconds": found.seconds,
            "tokens_per_second": found.tokens_per_second,
            "without_checkpointing": without,
            "with_checkpointing": with_it,
            "fits": self.fits,
            "remedies": [{"change": each.words} | _brief(each.found) for each in self.better],
            "not_needed": unneeded and {"change": unneeded.words} | _brief(unneeded.found),
        }

    def lines(self, source: str) -> list[str]:
        lines, (kind, is_named), found = [], class_of(self.shape), self.found
        if not is_named:
            lines.append(
                "architectures names no class of transformers; by its model_type, this is a "
                f"{kind.__name__}"
            )
        world = self.question.world_size
        ranks = "1 rank, which" if world == 1 else f"{world} ranks, each of which"
        teacher = "" if self.question.teacher is None else f", beside {self.question.teacher}"
        lines.append(f"{source}: {found.elements:,} parameters{teacher}; {ranks} holds at most:")
        lines += _table(found.parts)
        host, ranks = found.total(HOST), self.question.per_host
        if host and ranks > 1:
            lines.append(f"The {ranks} ranks of a host hold {size(ranks * host)} of its memory.")
        if moved := _table(found.traffic.links):
            steps = self.config.gradient_accumulation_steps or 1
            lines += [f"Each rank moves in a step (micro-batches: {steps}):", *moved]
        if self.question.batch:
            lines.append(f"This takes {_time(found)}.")
        else:
            lines.append("Activations and computation are not included: give --batch and --seq.")
            if found.seconds:
                lines.append(f"The rest takes {_time(found)}.")
        if self.other is not None:
            lines.append(self._other_way(self.other))
        return [*lines, *self._verdict(), f"  {self.question.speeds}"]

    def _other_way(self, other: Estimate) -> str:
        found, word = self.found, "Without" if self.question.checkpointing else "With"
        pairs = [
            (size(other.total(DEVICE)), size(found.total(DEVICE)), "{} on the device"),
            (size(other.activations), size(found.activations), "activations at most {}"),
        ]
        texts = [
            words.format(there if there == here else f"{there} instead of {here}")
            for there, here, words in pairs
        ]
        return f"{word} gradient checkpointing: {', '.join(texts)}, {_times(other, found)}."

    def _verdict(self) -> list[str]:
        """Say whether it fits, and what to change."""
        if self.fits:
            return self._what_fits() if self.limits else []
        lines = []
        for place, most in self.limits.items():
            if (parts := self.found.parts[place]) and self.found.total(place) > most:
                largest = max(parts, key=lambda part: parts[part])
                lines.append(
                    f"This does not fit {self._room(place, most)}; the largest part: {largest}."
                )
        lines += [f"  fits with {described(each)}" for each in self.better]
        if not self.better:
            words = "no change of stage, offload, micro-batch or checkpointing is enough"
            lines.append(f"  {words}: take shorter sequences, or more ranks")
        return lines

    def _room(self, place: str, most: int) -> str:
        """Return the limit in words: for a host its whole memory, which its ranks share."""
        ranks = self.question.per_host if place == HOST else 1
        shared = f", shared by {ranks} ranks" if ranks > 1 else ""
        return f"{_PLACES[place]} of {size(most * ranks)}{shared}"

    def _what_fits(self) -> list[str]:
        sizes = " and ".join(self._room(place, most) for place, most in self.limits.items())
        lines = [f"This fits {sizes}{'' if self.question.batch else ', without activations'}."]
        if self.unneeded is not None:
            without, most = self.unneeded.found, size(self.limits[DEVICE])
            lines.append(
                f"{self.unneeded.words.capitalize()}: the run would take "
                f"{size(without.total(DEVICE))} of {most} instead of "
                f"{size(self.found.total(DEVICE))}, and a step would be "
                f"{_rounded(self.found.seconds / without.seconds, 2)} times as fast "
                f"({_time(without)})."
            )
        return lines


def _brief(found: Estimate) -> dict[str, Any]:
    totals: dict[str, Any] = {place: found.total(place) for place in found.parts}
    return totals | {
        "activations": found.activations,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
    }


def described(remedy: Remedy) -> str:
    """Say what is changed, and how much memory and time that takes."""
    sizes = [size(remedy.found.total(DEVICE))]
    ranks = remedy.question.per_host
    shared = f" ({ranks} ranks)" if ranks > 1 else ""
    for place, words in ((HOST, f"of host memory{shared}"), (DISK, f"on disk{shared}")):
        if nbytes := ranks * remedy.found.total(place):
            sizes.append(f"{size(nbytes)} {words}")
    change = remedy.words or "nothing offloaded or sharded"
    return f"{change}: {' and '.join(sizes)}, {_time(remedy.found)}"


def _table(parts: Mapping[str, Mapping[str, int]]) -> list[str]:
    lines = []
    for place, of_place in parts.items():
        if of_place:
            lines.append(f"  {place:<16}{size(sum(of_place.values())):>12}")
            lines += [
                f"    {part:<38}{size(nbytes):>12}"
                for part, nbytes in sorted(of_place.items(), key=lambda p: -p[1])
            ]
    return lines


def _time(found: Estimate) -> str:
    """Return the time of a step with two digits, and its tokens/s with three."""
    text = f"{_rounded(found.seconds, 2)} s a step"
    return text + (f", {_rounded(found.tokens_per_second, 3)} tokens/s" if found.tokens else "")


def _times(new: Estimate, old: Estimate) -> str:
    """Return both times with as many digits as show the difference, at most three."""
    for digits in (2, 3):
        there, here = (_rounded(each.seconds, digits) for each in (new, old))
        if there != here:
            tokens = f" ({_rounded(new.tokens_per_second, 3)} tokens/s)" if new.tokens else ""
            return f"{there} s instead of {here} s{tokens}"
    return f"{there} s either way"


def _rounded(number: float, digits: int) -> str:
    """Return the number with this many digits, including trailing zeros."""
    places = digits - 1 - math.floor(math.log10(number)) if number else 0
    return f"{round(number, places):,.{max(places, 0)}f}"
