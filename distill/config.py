"""`DistillationConfig`: the arguments of the Trainer and of distillation, which are checked before
anything is loaded.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields

from transformers import Seq2SeqTrainingArguments

from distill.losses import Divergence
from distill.options import (
    ExampleArguments,
    GenerationArguments,
    LossArguments,
    TeacherArguments,
)
from translation.command_line import option


@dataclass
class DistillationConfig(
    TeacherArguments,
    LossArguments,
    GenerationArguments,
    ExampleArguments,
    Seq2SeqTrainingArguments,
):
    """Arguments of `DistillationTrainer`, on top of transformers' own."""

    remove_unused_columns: bool = option(
        False, "Drop columns that the student's forward does not accept."
    )

    def __post_init__(self) -> None:
        check(self)
        super().__post_init__()

    def needs_teacher(self) -> bool:
        """Whether any part of the loss needs a teacher."""
        return needs_teacher(self)

    def temperature_at(self, progress: float) -> float:
        """Return T after the fraction `progress` of training."""
        if self.temperature_schedule == "constant":
            return self.temperature
        done = (
            progress
            if self.temperature_schedule == "linear"
            else (1 - math.cos(math.pi * progress)) / 2
        )
        return self.temperature + (self.final_temperature - self.temperature) * done


def needs_teacher(given: DistillationConfig | argparse.Namespace) -> bool:
    """Whether any part of the loss needs a teacher."""
    return (
        given.kd_alpha > 0
        or given.hidden_loss_weight > 0
        or given.attn_relation_weight > 0
        or given.seq_kd
    )


def check(given: DistillationConfig | argparse.Namespace) -> None:
    """Check the arguments of distillation, in a `DistillationConfig` or an argparse namespace.

    Raises:
        ValueError: a value is out of range, or two exclude each other. The message names them.
    """
    Divergence(given.loss_type, given.beta, given.skew_alpha)
    for name in ("temperature", "final_temperature"):
        value = getattr(given, name)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}: it must be a positive number")
    for name in ("kd_alpha", "lmbda"):
        if not 0 <= getattr(given, name) <= 1:
            raise ValueError(f"{name} is {getattr(given, name)}: it must be between 0 and 1")
    for name in ("top_k", "chunk_size", "hidden_loss_weight", "attn_relation_weight"):
        if getattr(given, name) < 0:
            raise ValueError(f"{name} is {getattr(given, name)}: it must be 0 or more")
    for field in fields(LossArguments):
        allowed, value = field.metadata.get("choices"), getattr(given, field.name)
        if allowed and value not in allowed:
            raise ValueError(f"{field.name} is {value!r}: choose one of {', '.join(allowed)}")
    if given.loss_type == "uld" and given.top_k:
        raise ValueError(
            "top_k cannot be used with loss_type uld, which compares sorted probabilities: set it "
            "to 0"
        )
    aligned = {
        "lmbda": given.lmbda > 0,
        "seq_kd": given.seq_kd,
        "hidden_loss_weight": given.hidden_loss_weight > 0,
        "attn_relation_weight": given.attn_relation_weight > 0,
    }
    if given.loss_type == "uld" and any(aligned.values()):
        names = ", ".join(name for name, value in aligned.items() if value)
        raise ValueError(
            f"{names} needs one tokenizer for both models and cannot be used with loss_type uld: "
            "leave it out"
        )
    if given.teacher_load_in_4bit and given.teacher_load_in_8bit:
        raise ValueError("teacher_load_in_4bit and teacher_load_in_8bit: choose one of them")
    if given.layer_mapping and not (given.hidden_loss_weight or given.attn_relation_weight):
        raise ValueError("layer_mapping needs hidden_loss_weight or attn_relation_weight above 0")
    if given.lmbda and not needs_teacher(given):
        raise ValueError(
            "lmbda: a student learns nothing from its own text without a teacher: give a kd_alpha "
            "above 0"
        )
    if given.label_smoothing_factor:
        raise ValueError(
            "label_smoothing_factor has no effect on the losses of distillation: leave it out"
        )
    if not given.eval_do_concat_batches:
        raise ValueError(
            "eval_do_concat_batches False cannot be used, because evaluation adds up the losses of "
            "all batches: leave it out"
        )
    for name, smallest in {"max_new_tokens": 1, "max_length": 2}.items():
        if getattr(given, name) < smallest:
            raise ValueError(f"{name} is {getattr(given, name)}: it must be at least {smallest}")
    _check_cache(given)


def _check_cache(given: DistillationConfig | argparse.Namespace) -> None:
    if not given.teacher_cache:
        return
    needs_live = {
        "lmbda": given.lmbda > 0,
        "seq_kd": given.seq_kd,
        "hidden_loss_weight": given.hidden_loss_weight > 0,
        "attn_relation_weight": given.attn_relation_weight > 0,
        "temperature_schedule": given.temperature_schedule != "constant",
        "loss_type uld": given.loss_type == "uld",
        "overlap_teacher": given.overlap_teacher,
    }
    if names := [name for name, value in needs_live.items() if value]:
        raise ValueError(
            f"teacher_cache holds probabilities at one temperature, and {', '.join(names)} needs a "
            "live teacher: leave out one of them"
        )
