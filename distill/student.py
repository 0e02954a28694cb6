"""Creates students from a configuration, or from some layers of the teacher."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)

import zero
from translation.records import InputError

_LAYER = re.compile(
    r"^(?P<before>.*?\.(?:layers|layer|h|blocks|block))\.(?P<index>\d+)\.(?P<after>.*)$"
)


def from_config(config: PretrainedConfig) -> PreTrainedModel:
    """Return an untrained language model. With ZeRO-3 it is sharded while it is built."""
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_config(config)


def load_config(name: str) -> PretrainedConfig:
    """Load a model's configuration from a folder, a JSON file or the hub."""
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--student_config {name}: no model configuration could be loaded from it ({error})"
        ) from error


def parse_layers(text: str, available: int) -> list[int]:
    """Parse layer indices such as "0,5,11".

    InputError if one is not an index of the teacher's `available` layers.
    """
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdigit() or int(part) >= available]
    if wrong:
        raise InputError(
            f"--init_student_from_teacher {text}: {wrong[0]!r} is not a layer; the teacher has "
            f"layers 0 to {available - 1}"
        )
    return [int(part) for part in parts]


def cut_config(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """Return a configuration with only these layers of `config`, in both encoder and decoder."""
    cut = copy.deepcopy(config)
    cut.num_hidden_layers = len(layers)
    if getattr(cut, "num_decoder_layers", None) is not None:
        cut.num_decoder_layers = len(layers)
    if getattr(cut, "layer_types", None):
        cut.layer_types = [config.layer_types[layer] for layer in layers]
    return cut


@torch.no_grad()
def copy_layers(student: PreTrainedModel, teacher: PreTrainedModel, layers: Sequence[int]) -> None:
    """Copy the teacher's layer `layers[i]` to the student's layer i, and copy all other weights
    too.

    Both models may be sharded: one parameter at a time is gathered. Some parameters exist only in
    the teacher's first layer (T5's position biases). They go to the student's first layer.

    Raises:
        InputError: a parameter of the student has a different shape, or is not in the teacher.
    """
    source = dict(teacher.named_parameters())
    for name, param in student.named_parameters():
        from_name = _source_name(name, layers)
        theirs = source.get(from_name, source.get(name))
        if theirs is None or theirs.shape != param.shape:
            what = (
                "is not in the teacher"
                if theirs is None
                else f"is {tuple(theirs.shape)} in the teacher"
            )
            raise InputError(
                f"--init_student_from_teacher: {name} {tuple(param.shape)} {what}; the student "
                "must be the same kind of"
                f" model with the same widths: leave out --student_config"
            )
        with zero.GatheredParameters([theirs]), zero.GatheredParameters([param], modifier_rank=0):
            param.copy_(theirs)


def _source_name(name: str, layers: Sequence[int]) -> str:
    if (found := _LAYER.match(name)) is None:
        return name
    return f"{found['before']}.{layers[int(found['index'])]}.{found['after']}"
