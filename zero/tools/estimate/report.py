"""Prints what `zero estimate` has predicted, as text or as a JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from zero.monitor.out_of_memory import size
from zero.tools.estimate.adapters import elements
from zero.tools.estimate.machine import DISK, HOST
from zero.tools.estimate.rank import Estimate
from zero.tools.estimate.remedies import Remedy, Search
from zero.tools.estimate.traffic import ON_HOST


def report(source: str, search: Search, as_json: bool) -> str:
    """Return the estimate of the model in the folder `source`, and what could be changed: with
    which changes it fits, if it does not, or which one also fits and is faster.
    """
    fits = search.fits(search.found)
    remedies = [] if fits else search.remedies()
    faster = search.faster() if fits else None
    if as_json:
        return json.dumps(_facts(search, fits, remedies, faster), indent=2)
    verdict = _verdict(search, fits, remedies, faster)
    return "\n".join([*_estimated(source, search), *verdict, f"  {search.question.speeds}"])


def _facts(
    search: Search, fits: bool, remedies: list[Remedy], faster: Remedy | None
) -> dict[str, Any]:
    found, question = search.found, search.question
    traffic, itemsize = found.traffic, search.config.compute_dtype.itemsize
    return {
        "class": type(search.model).__name__,
        "elements": found.elements,
        "bytes": found.parts,
        "activations": found.activations,
        "host_memory_of_a_host": found.total(HOST) * question.per_host,
        "traffic": traffic.links,
        "operations": traffic.operations,
        "host_memory_of_updates": traffic.computed[ON_HOST],
        "speeds": asdict(question.speeds),
        "parts_of_a_step": traffic.parts(question.speeds, itemsize),
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "fits": fits,
        "remedies": list(map(_brief, remedies)),
        "not_needed": faster and _brief(faster),
    }


def _brief(remedy: Remedy) -> dict[str, Any]:
    found = remedy.found
    return {
        "change": remedy.words,
        **{place: found.total(place) for place in found.parts},
        "activations": found.activations,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
    }


def _estimated(source: str, search: Search) -> list[str]:
    lines, found, question = [], search.found, search.question
    name = type(search.model).__name__
    if name not in (search.model.config.architectures or ()):
        lines.append(
            f"architectures names no class of transformers; by its model_type, this is a {name}"
        )
    world, beside = question.world_size, ""
    ranks = "1 rank, which" if world == 1 else f"{world} ranks, each of which"
    if question.teacher is not None:
        teacher = question.teacher.model
        beside = f", beside {teacher.config.name_or_path} ({elements(teacher):,} parameters)"
    lines.append(f"{source}: {found.elements:,} parameters{beside}; {ranks} holds at most:")
    lines += _table(found.parts)
    host, ranks = found.total(HOST), question.per_host
    if host and ranks > 1:
        lines.append(f"The {ranks} ranks of a host hold {size(ranks * host)} of its memory.")
    if moved := _table(found.traffic.links):
        steps = search.config.gradient_accumulation_steps or 1
        lines += [f"Each rank moves in a step (micro-batches: {steps}):", *moved]
    if not question.batch:
        lines.append("Activations and computation are not included: give --batch and --seq.")
    return [*lines, f"{'This' if question.batch else 'The rest'} takes {_time(found)}."]


def _verdict(
    search: Search, fits: bool, remedies: list[Remedy], faster: Remedy | None
) -> list[str]:
    if not search.limits:
        return []
    room = " and ".join(f"{size(most)} of {place} memory" for place, most in search.limits.items())
    lines = [f"This {'fits' if fits else 'does not fit'}: each rank has {room}."]
    if faster is not None:
        times = _rounded(search.found.seconds / faster.found.seconds, 2)
        lines.append(f"  also fits, and is {times} times as fast, with {described(faster)}")
    for place, most in search.limits.items():
        if search.found.total(place) > most:
            parts = search.found.parts[place]
            largest = max(parts, key=lambda part: parts[part])
            lines.append(f"  the largest part of {place} memory: {largest}")
    lines += [f"  fits with {described(remedy)}" for remedy in remedies]
    if not fits and not remedies:
        words = "no change of stage, offload, micro-batch or checkpointing is enough"
        lines.append(f"  {words}: take shorter sequences, or more ranks")
    return lines


def described(remedy: Remedy) -> str:
    """Say what is changed, and how much memory of a rank and time that takes."""
    found, words = remedy.found, {HOST: " of host memory", DISK: " on disk"}
    sizes = [
        size(found.total(place)) + words.get(place, "")
        for place in found.parts
        if found.total(place)
    ]
    change = remedy.words or "nothing offloaded or sharded"
    return f"{change}: {', '.join(sizes)}, {_time(found)}"


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


def _rounded(number: float, digits: int) -> str:
    """Return the number with this many digits, including trailing zeros."""
    places = digits - 1 - math.floor(math.log10(number)) if number else 0
    return f"{round(number, places):,.{max(places, 0)}f}"
