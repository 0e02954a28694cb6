"""What `zero estimate` and `zero plan` print: the verdict first, then what it is based on, as text
or as a JSON object."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero.errors import UsageError, rounded, size
from zero.tools.arguments import judged
from zero.tools.estimate.machine import DISK, HOST
from zero.tools.estimate.question import PLAIN
from zero.tools.estimate.rank import Estimate
from zero.tools.estimate.remedies import Remedy, Search
from zero.tools.estimate.traffic import ON_HOST
from zero.tools.explain import explain

# The number of configurations that a plan names: the best one and others.
NAMED = 3


def report(source: str, search: Search, as_json: bool) -> str:
    """Return the estimate of the model in the folder `source`, and with which changes it fits, if
    it does not.
    """
    fits = search.fits(search.found)
    remedies = [] if fits else search.remedies()
    if as_json:
        return json.dumps(_facts(search, fits, remedies), indent=2)
    lines = [*_verdict(search, fits, remedies), "", *_details(source, search)]
    return "\n".join([*map(_wrapped, lines), str(search.question.speeds)])


def plan(source: str, search: Search, out: Path, as_json: bool) -> str:
    """Write the fastest configuration that fits to `out`, and return what to print. The search
    begins at `PLAIN`.

    Raises UsageError if nothing fits.
    """
    question, found = search.question, search.remedies()[:NAMED]
    if not found:
        raise UsageError(
            f"plan: {source} does not fit with {_room(search)} for each of {question.world_size} "
            "process(es): take more of them, shorter sequences, or an adapter"
        )
    chosen, batch = found[0], found[0].question.batch
    section = PLAIN["zero_optimization"] | chosen.sections.get("zero_optimization", {})
    if section["stage"] == 3 and all(each.requires_grad for each in search.model.parameters()):
        section["stage3_gather_16bit_weights_on_model_save"] = True  # adapters do not need it
    sizes = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": question.batch // batch,
    }
    keys = PLAIN | sizes | chosen.sections | {"zero_optimization": section}
    out.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    best, *others = map(_described, found)
    if as_json:
        facts = {"file": str(out), "configuration": keys, "found": [best, *others]}
        return json.dumps(facts, indent=2)
    checkpointing = " --gradient_checkpointing" if chosen.question.checkpointing else ""
    lines = [
        f"{out}: the fastest that fits, with {question.length:,} tokens a sequence: {best}",
        "The next ones:" if others else "Nothing else needs less memory.",
        *(f"  {each}" for each in others),
        f"With the Trainer: --deepspeed {out} --per_device_train_batch_size {batch} "
        f"--gradient_accumulation_steps {question.batch // batch} --bf16{checkpointing}",
    ]
    return "\n".join([*map(_wrapped, lines), str(question.speeds), "", explain(str(out))])


def _wrapped(line: str) -> str:
    """A number stays on the line of its unit."""
    line = re.sub(r"(?<=\d) ", "\xa0", line)
    lines = textwrap.fill(line, 100, subsequent_indent="    ", break_on_hyphens=False)
    return lines.replace("\xa0", " ")


def _facts(search: Search, fits: bool, remedies: list[Remedy]) -> dict[str, Any]:
    found, question = search.found, search.question
    traffic, itemsize = found.traffic, search.config.compute_dtype.itemsize
    return {
        "class": type(search.model).__name__,
        "elements": found.elements,
        "bytes": found.parts,
        "host_memory_of_a_host": found.total(HOST) * question.per_host,
        "traffic": traffic.links,
        "operations": traffic.operations,
        "host_memory_of_updates": traffic.computed[ON_HOST],
        "speeds": asdict(question.speeds),
        "parts_of_a_step": traffic.parts(question.speeds, itemsize),
        **_facts_of(found),
        "fits": fits,
        "remedies": [{"change": each.words} | _facts_of(each.found) for each in remedies],
    }


def _facts_of(found: Estimate) -> dict[str, Any]:
    return {
        **{place: found.total(place) for place in found.parts},
        "activations": found.activations,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
    }


def _room(search: Search) -> str:
    return " and ".join(f"{size(most)} of {place} memory" for place, most in search.limits.items())


def _verdict(search: Search, fits: bool, remedies: list[Remedy]) -> list[str]:
    """Whether it fits, what it takes, and what to change."""
    lines = []
    if search.limits:
        verdict = judged(f"This {'fits' if fits else 'does not fit'}", fits)
        lines.append(f"{verdict}: each rank has {_room(search)}.")
    world, found = search.question.world_size, search.found
    ranks = "The rank" if world == 1 else f"Each of {world} ranks"
    without = "" if search.question.batch else ", without activations and computation"
    lines.append(f"{ranks} needs {_sizes(found)}, {_time(found)}{without}.")
    for place, most in search.limits.items():
        if found.total(place) > most:
            parts = found.parts[place]
            largest = max(parts, key=lambda part: parts[part])
            lines.append(f"  the largest part of {place} memory: {largest}")
    lines += [f"  fits with {_described(remedy)}" for remedy in remedies]
    if not fits and not remedies:
        lines.append(
            "  no change of stage, offload, micro-batch or checkpointing is enough: take shorter "
            "sequences, or more ranks"
        )
    return lines


def _details(source: str, search: Search) -> list[str]:
    found, question = search.found, search.question
    lines = [f"{source}: {found.elements:,} parameters. Each rank holds at most:"]
    lines += _table(found.parts)
    host, ranks = found.total(HOST), question.per_host
    if host and ranks > 1:
        lines.append(f"The {ranks} ranks of a host hold {size(ranks * host)} of its memory.")
    if moved := _table(found.traffic.links):
        steps = search.config.gradient_accumulation_steps or 1
        lines += [f"Each rank moves in a step (micro-batches: {steps}):", *moved]
    if not question.batch:
        lines.append("For activations and computation, give --batch and --seq.")
    return lines


def _table(parts: Mapping[str, Mapping[str, int]]) -> list[str]:
    lines = []
    for place, of_place in parts.items():
        if of_place:
            lines.append(f"  {place:<40}{size(sum(of_place.values())):>10}")
            by_size = sorted(of_place.items(), key=lambda part: -part[1])
            lines += [f"    {part:<38}{size(nbytes):>10}" for part, nbytes in by_size]
    return lines


def _described(remedy: Remedy) -> str:
    """Say what is changed, and how much memory of a rank and time that takes."""
    change = remedy.words or "nothing offloaded or sharded"
    return f"{change}: {_sizes(remedy.found)}, {_time(remedy.found)}"


def _sizes(found: Estimate) -> str:
    words = {HOST: " of host memory", DISK: " on disk"}
    sizes = [(place, found.total(place)) for place in found.parts if found.total(place)]
    return ", ".join(size(nbytes) + words.get(place, "") for place, nbytes in sizes)


def _time(found: Estimate) -> str:
    text = f"{rounded(found.seconds, 2)} s a step"
    return text + (f", {rounded(found.tokens_per_second)} tokens/s" if found.tokens else "")
