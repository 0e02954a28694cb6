"""Creates students from a configuration, or from some layers of the teacher."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

import zero
from distill.hidden import decoder_depth, layers_and_width
from distill.on_policy import TOKENS
from translation.records import InputError

# Indices of layers, by the name of the list that holds them.
Layers = Mapping[str, Sequence[int]]
_LAYER = re.compile(
    r"^(?P<before>.*?\.(?:layers|layer|h|blocks|block))\.(?P<index>\d+)\.(?P<after>.*)$"
)


def from_config(config: PretrainedConfig, **options: object) -> PreTrainedModel:
    """Return an untrained language model. With ZeRO-3 it is sharded while it is built."""
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_config(config, **options)


def load_config(name: str, argument: str = "student_config", **options: object) -> PretrainedConfig:
    """Load a model's configuration from a folder, a JSON file or the hub."""
    try:
        return AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--{argument} {name}: no model configuration could be loaded from it ({error})"
        ) from error


def depth(config: PretrainedConfig) -> int:
    """Return the number of layers of a model, or of the shorter one of its encoder and decoder."""
    return min(config.get_text_config().num_hidden_layers, layers_and_width(config)[0])


def parse_best(text: str, available: int) -> int | None:
    """Return 3 for "best:3", and None for layer indices.

    InputError if the teacher, which has `available` layers, does not have that many.
    """
    if not text.startswith("best:"):
        return None
    number = text.removeprefix("best:")
    if not number.isdigit() or not 1 <= int(number) <= available:
        raise InputError(
            f"--init_student_from_teacher {text}: give a number of layers from 1 to {available}, "
            "such as best:1"
        )
    return int(number)


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


def stacks(model: PreTrainedModel) -> dict[str, list[nn.Module]]:
    """Return the layers of the model by the name of the list that holds them: one list, or those
    of encoder and decoder.
    """
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        layer = _LAYER.match(f"{name}.")
        if layer is not None and not layer["after"]:
            found.setdefault(layer["before"], []).append(module)
    return found


def cut_config(config: PretrainedConfig, layers: Layers) -> PretrainedConfig:
    """Return `config` with only these layers of each stack. All stacks keep the same number."""
    cut = copy.deepcopy(config)
    kept = next(iter(layers.values()))
    cut.num_hidden_layers = len(kept)
    if name := decoder_depth(cut):
        setattr(cut, name, len(kept))
    if getattr(cut, "layer_types", None):
        cut.layer_types = [config.layer_types[layer] for layer in kept]
    return cut


@torch.no_grad()
def copy_layers(student: PreTrainedModel, teacher: PreTrainedModel, layers: Layers) -> None:
    """Copy the teacher's layer `layers[stack][i]` to the student's layer i of the same stack, and
    copy all other weights and saved buffers too.

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
                "must be the same kind of model with the same widths: leave out --student_config"
            )
        with zero.GatheredParameters([theirs]), zero.GatheredParameters([param], modifier_rank=0):
            param.copy_(theirs)
    buffers, saved = dict(teacher.named_buffers()), student.state_dict()
    for name, buffer in student.named_buffers():
        theirs = buffers.get(_source_name(name, layers))
        # The configuration gives what is not saved, such as the frequencies of rotary positions.
        if name in saved and theirs is not None and theirs.shape == buffer.shape:
            buffer.copy_(theirs)


def generation_config_of(teacher: PreTrainedModel) -> GenerationConfig:
    """Return a copy of the teacher's generation settings. If they contradict each other, as in old
    files, it has the special tokens only, because transformers refuses to save the rest.
    """
    own = copy.deepcopy(teacher.generation_config)
    try:
        own.validate(strict=True)
    except ValueError:
        return GenerationConfig(**{name: getattr(own, name, None) for name in TOKENS})
    return own


def _source_name(name: str, layers: Layers) -> str:
    found = _LAYER.match(name)
    if found is None or found["before"] not in layers:
        return name
    stack, index = found["before"], int(found["index"])
    if index >= len(layers[stack]):
        raise InputError(
            f"--init_student_from_teacher names {len(layers[stack])} layers, and the model of "
            "--student_config has more: name one for each, or leave out --student_config"
        )
    return f"{stack}.{layers[stack][index]}.{found['after']}"
