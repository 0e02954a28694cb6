"""The arguments of the demonstrations: defaults for a run without model and data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch import accelerator

from translation.arguments import ArgumentParser

# Arguments that are given override these. On a CPU
# training is in fp32, because many CPUs compute bf16 ten times slower. The final checkpoint has 16
# bits in any case.
TRANSLATION = {
    "output_dir": "output/translation_demo",
    "overwrite_output_dir": True,
    "do_train": True,
    "do_eval": True,
    "do_predict": True,
    "bf16": accelerator.is_available(),
    "learning_rate": 5e-4,
    "adam_beta2": 0.99,
    "warmup_steps": 50,
    "num_train_epochs": 2.5,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 128,
    "max_source_length": 32,
    "max_target_length": 32,
    "logging_steps": 50,
    "save_strategy": "no",
    "report_to": "none",
}


def of_translation(given: argparse.Namespace) -> dict:
    """Return TRANSLATION without what contradicts the given stages, precision or output
    folder.
    """
    defaults = dict(TRANSLATION)
    if given.do_train or given.do_eval or given.do_predict:
        for stage in ("do_train", "do_eval", "do_predict"):
            del defaults[stage]
    if given.fp16:
        del defaults["bf16"]
    if given.output_dir:
        del defaults["overwrite_output_dir"]
    return defaults


TEACHER_STEPS = 1200

DISTILLATION = {
    "output_dir": "output/distill_demo",
    "overwrite_output_dir": True,  # tokenizer and teacher of earlier runs are in it
    "do_train": True,
    "do_eval": True,
    "ddp_find_unused_parameters": False,
    "max_length": 64,
    "max_steps": 300,
    "teacher_steps": TEACHER_STEPS,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 64,
    "learning_rate": 4e-3,
    "hidden_loss_weight": 3.0,
    "hidden_loss_type": "cosine",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "weight_decay": 0.01,
    "max_eval_samples": 256,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "logging_steps": 50,
    "save_strategy": "no",
    "report_to": "none",
}


def of_distillation(parser: ArgumentParser, argv: Sequence[str] | None) -> dict[str, object]:
    """Return DISTILLATION, whose teacher trains no longer than the user lets the students."""
    defaults = {**DISTILLATION, "num_train_epochs": parser.get_default("num_train_epochs")}
    parser.set_defaults(max_steps=None, num_train_epochs=None)
    given = parser.parse_args(argv)
    if given.max_steps is not None and given.max_steps > 0:
        defaults["teacher_steps"] = min(TEACHER_STEPS, given.max_steps)
    elif given.num_train_epochs is not None:
        defaults |= {"max_steps": -1, "teacher_steps": None}
    return defaults
