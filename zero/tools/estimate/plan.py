"""`zero plan`: writes the fastest configuration with which training fits, as a ds_config.json.

`zero/tools/estimate/remedies.py` decides what is tried, and in which order."""

from __future__ import annotations

import json
from pathlib import Path

from zero.errors import UsageError
from zero.monitor.out_of_memory import size
from zero.tools.estimate.question import PLAIN
from zero.tools.estimate.remedies import Search
from zero.tools.estimate.report import described
from zero.tools.explain import explain

# The number of remedies that are named: the best one and others.
NAMED = 3


def plan(source: str, search: Search, out: Path, as_json: bool) -> str:
    """Write the configuration to `out`, and return what to print. The search begins at `PLAIN`.

    Raises UsageError if nothing fits.
    """
    question, found = search.question, search.remedies()[:NAMED]
    if not found:
        sizes = (f"{size(most)} of {place} memory" for place, most in search.limits.items())
        raise UsageError(
            f"plan: {source} does not fit with {' and '.join(sizes)} for each of "
            f"{question.world_size} process(es): take more of them, shorter sequences, or an "
            "adapter"
        )
    batch = found[0].question.batch
    section = PLAIN["zero_optimization"] | found[0].keys
    if section["stage"] == 3 and all(each.requires_grad for each in search.model.parameters()):
        section["stage3_gather_16bit_weights_on_model_save"] = True  # adapters do not need it
    keys = PLAIN | {
        "zero_optimization": section,
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": question.batch // batch,
    }
    out.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    best, *others = map(described, found)
    if as_json:
        facts = {"file": str(out), "configuration": keys, "found": [best, *others]}
        return json.dumps(facts, indent=2)
    steps = question.batch // batch
    options = f"--per_device_train_batch_size {batch} --gradient_accumulation_steps {steps} --bf16"
    if found[0].question.checkpointing:
        options += " --gradient_checkpointing"
    return "\n".join(
        [
            f"The fastest that fits, with {question.length} tokens a sequence: {best}",
            "The next ones:" if others else "Nothing else fits.",
            *(f"  {each}" for each in others),
            f"  {question.speeds}",
            f"Written to {out}; with the Trainer: --deepspeed {out} {options}",
            "",
            explain(str(out)),
        ]
    )
