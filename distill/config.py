"""`DistillationConfig`: the arguments of the Trainer and of distillation, which are checked before
anything is loaded.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import TypeVar

from transformers import Seq2SeqTrainingArguments

from distill.cache import SAMPLINGS
from distill.hidden import HIDDEN_LOSSES
from distill.losses import LOSS_TYPES, Divergence
from distill.vocabulary import VOCAB_POLICIES

SCHEDULES = ("constant", "linear", "cosine")
Value = TypeVar("Value")


def _field(default: Value, help: str, **metadata: object) -> Value:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class DistillationConfig(Seq2SeqTrainingArguments):
    """Arguments of `DistillationTrainer`, on top of transformers' own."""

    teacher_model_name_or_path: str | None = _field(None, "Teacher: a model folder or a hub name.")
    teacher_deepspeed: str | None = _field(
        None,
        "The teacher's ds_config. Default: stage and precision of --deepspeed, with offloaded "
        "parameters.",
    )
    teacher_device: str | None = _field(
        None,
        "Device of a teacher that is not sharded, such as cuda:1. Default: the student's device.",
    )
    overlap_teacher: bool = _field(
        False,
        "On an accelerator, run the teacher's forward beside the student's. The device then needs "
        "the memory of both at the same time.",
    )
    teacher_load_in_4bit: bool = _field(
        False, "Quantize the teacher's linear layers to NF4 (bitsandbytes) while it is loaded."
    )
    teacher_load_in_8bit: bool = _field(
        False, "Quantize the teacher's linear layers to LLM.int8 while it is loaded."
    )
    teacher_cache: str | None = _field(
        None, "Folder written by cache_teacher. It replaces the teacher."
    )
    cache_sampling: str = _field(
        "top_k",
        "Which --top_k tokens cache_teacher stores: the most probable ones, or a sample whose "
        "gradient is unbiased for --loss_type forward_kl.",
        choices=SAMPLINGS,
    )
    loss_type: str = _field(
        "forward_kl", "Divergence between student and teacher.", choices=LOSS_TYPES
    )
    beta: float = _field(0.5, "Weight of the teacher in generalised JSD, above 0 and below 1.")
    skew_alpha: float = _field(
        0.1,
        "Share of the first distribution that a skew loss mixes into the second, from 0 to below "
        "1.",
    )
    temperature: float = _field(
        1.0, "Temperature T of both softmaxes. The loss is multiplied by T^2."
    )
    temperature_schedule: str = _field(
        "constant", "How T changes to --final_temperature.", choices=SCHEDULES
    )
    final_temperature: float = _field(
        1.0, "T at the end of training, unless the schedule is constant."
    )
    kd_alpha: float = _field(
        0.9,
        "loss = (1 - kd_alpha) cross-entropy + kd_alpha divergence. With 0 no teacher is needed.",
    )
    top_k: int = _field(
        0,
        "Compare the teacher's k most probable tokens, and all others as one token. 0: all tokens.",
    )
    hidden_loss_weight: float = _field(0.0, "Weight of the loss on hidden states.")
    hidden_loss_type: str = _field(
        "mse", "Loss on hidden states, after a learned projection.", choices=HIDDEN_LOSSES
    )
    layer_mapping: str | None = _field(
        None,
        "Pairs student:teacher of layers to match, such as 1:3,2:6 (0: embeddings). Default: "
        "evenly spread.",
    )
    attn_relation_weight: float = _field(
        0.0, "Weight of MiniLM's relations of queries, keys and values."
    )
    chunk_size: int = _field(
        0, "Tokens whose logits are in memory at a time. 0: depends on the size of the vocabulary."
    )
    vocab_policy: str = _field(
        "common",
        "common: compare the ids that both tokenizers know. strict: reject vocabularies that "
        "differ.",
        choices=VOCAB_POLICIES,
    )
    lmbda: float = _field(
        0.0, "Fraction of batches that the student generates (GKD, arXiv 2306.13649)."
    )
    seq_kd: bool = _field(
        False, "Let the teacher generate the other batches (sequence-level distillation)."
    )
    max_new_tokens: int = _field(64, "Tokens to generate for --lmbda and --seq_kd.")
    remove_unused_columns: bool = _field(
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
    choices = {
        "temperature_schedule": SCHEDULES,
        "hidden_loss_type": HIDDEN_LOSSES,
        "vocab_policy": VOCAB_POLICIES,
    }
    for name, allowed in choices.items():
        if getattr(given, name) not in allowed:
            raise ValueError(
                f"{name} is {getattr(given, name)!r}: choose one of {', '.join(allowed)}"
            )
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
    if given.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {given.max_new_tokens}: it must be at least 1")
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
