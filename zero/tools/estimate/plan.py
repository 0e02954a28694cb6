"""`zero plan`: writes the fastest configuration with which training fits, as a ds_config.json.

`zero/tools/estimate/remedies.py` decides what is tried, and in which order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero.config import load_config
from zero.errors import UsageError
from zero.monitor.out_of_memory import size
from zero.tools.estimate.model import build, read_config
from zero.tools.estimate.question import Question
from zero.tools.estimate.remedies import Remedy, Search
from zero.tools.estimate.report import described
from zero.tools.explain import explain

# The configuration that is changed until it fits.
START: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
# The number of remedies that are named in addition to the best one.
OTHERS = 2


def plan(
    source: str, question: Question, limits: Mapping[str, int], out: Path, as_json: bool
) -> str:
    """Write the configuration to `out`, and return what to print.

    Raises UsageError if nothing fits.
    """
    config = load_config(START)
    model = build(read_config(source), config.compute_dtype, question.adapter)
    search = Search(model, config, question, limits)
    found = search.remedies()
    if not found:
        sizes = " and ".join(f"{size(most)} of {place} memory" for place, most in limits.items())
        raise UsageError(
            f"plan: {source} does not fit with {sizes} for each of {question.world_size} "
            "process(es): take more of them, shorter sequences, or an adapter"
        )
    best, *others = found[: OTHERS + 1]
    keys = configuration(best, question)
    out.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    if as_json:
        words = [described(each) for each in found[: OTHERS + 1]]
        return json.dumps({"file": str(out), "configuration": keys, "found": words}, indent=2)
    batch, steps = (
        keys[key] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    options = f"--per_device_train_batch_size {batch} --gradient_accumulation_steps {steps} --bf16"
    if best.question.checkpointing:
        options += " --gradient_checkpointing"
    lines = [
        f"The fastest that fits, with {question.length} tokens a sequence: {described(best)}",
        "The next ones:" if others else "Nothing else fits.",
        *(f"  {described(each)}" for each in others),
    ]
    lines += [
        f"  {question.speeds}",
        f"Written to {out}; with the Trainer: --deepspeed {out} {options}",
        "",
        explain(str(out)),
    ]
    return "\n".join(lines)


def configuration(remedy: Remedy, question: Question) -> dict[str, Any]:
    """Return the keys of `START`, changed by those of the remedy, and its batch."""
    batch = remedy.question.batch
    return START | {
        "zero_optimization": START["zero_optimization"] | remedy.change.keys,
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": question.batch // batch,
    }
