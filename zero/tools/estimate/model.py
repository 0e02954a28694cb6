"""The model of an estimate: read from its folder, built without values, and called for one
micro-batch."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
)
from transformers.initialization import no_init_weights

from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.tools.estimate.machine import META, Memory
from zero.tools.estimate.question import Question, model_folder

_REMEDY = "leave --batch and --seq out, then activations are not counted"


def read_config(source: str) -> transformers.PretrainedConfig:
    """The configuration of a model's folder, or of a file `config.json`.

    ValueError where there is none.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(
            model_folder(source), trust_remote_code=False
        )
    except Exception as error:  # of any kind: the file is somebody else's
        raise UsageError(f"{source}: {' '.join(str(error).split())}") from error
    class_of(config)
    return config


def class_of(
    config: transformers.PretrainedConfig,
) -> tuple[type[transformers.PreTrainedModel], bool]:
    """The model's class, and whether `architectures` names it. Else it is the language model of
    this model_type.

    If there is none, it is the base model. Raises UsageError for a type of which transformers has
    no model."""
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind, True
    head = (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        if config.is_encoder_decoder
        else MODEL_FOR_CAUSAL_LM_MAPPING
    )
    for mapping in (head, MODEL_MAPPING):
        if type(config) in mapping:
            kinds: Any = mapping[type(config)]  # one, or several
            return (kinds[0] if isinstance(kinds, tuple) else kinds), False
    raise UsageError(
        f"config.json: model_type {config.model_type} has no model in transformers: name one in "
        "architectures"
    )


def build(config: transformers.PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model on the meta device, of this dtype.

    UsageError for one whose constructor asks for values.
    """
    kind, _ = class_of(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # `init_weights` ties parameters, too.
        with META, Memory(""), no_init_weights():
            model = kind(config)
        model.tie_weights()
        return model.train()
    except NotImplementedError as error:
        raise UsageError(f"{kind.__name__} cannot be built without values: {error}") from error
    finally:
        torch.set_default_dtype(before)


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device."""
    known: dict[int, Any] = {}
    for param in model.parameters():
        empty = torch.empty_like(param, device=META)
        known[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        known[id(buffer)] = torch.empty_like(buffer, device=META)
    return copy.deepcopy(model, known)


def enable_checkpointing(model: Any) -> None:
    """Gradient checkpointing of a transformers model without dropout."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # transformers 5.23 has a new name, earlier releases do not
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


def micro_batch(engine: ZeroEngine, question: Question) -> Callable[[], torch.Tensor]:
    """A function that runs the forward of a micro-batch and returns the loss."""
    if not (question.batch and question.length):
        _replace_forwards(engine)
        return lambda: engine(torch.zeros(1, device=META, requires_grad=True)).sum()
    model = engine.module
    _require_tokens(model, question.length)
    ids = torch.zeros(question.batch, question.length, dtype=torch.long, device=META)
    labels = ids[:, 0] if type(model).__name__.endswith("ForSequenceClassification") else ids

    def loss() -> torch.Tensor:
        try:
            return engine(input_ids=ids, labels=labels, use_cache=False).loss
        except Exception as error:  # of any kind: the forward is somebody else's
            why = " ".join(str(error).split())[:200]
            raise UsageError(
                f"{type(model).__name__} does not train on token ids and labels ({why}): {_REMEDY}"
            ) from error

    return loss


def _require_tokens(model: nn.Module, length: int) -> None:
    name = type(model).__name__
    if model.main_input_name != "input_ids":
        raise UsageError(f"{name} takes {model.main_input_name}, not token ids: {_REMEDY}")
    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise UsageError(
            f"{name} has no loss: name a class with a head in architectures of config.json, or "
            f"{_REMEDY}"
        )
    positions = getattr(model.config, "max_position_embeddings", None) or length
    if length > positions:
        raise UsageError(
            f"--seq {length}: the model's configuration has max_position_embeddings {positions}"
        )


class _Use(torch.autograd.Function):
    """Uses parameters as a module does, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.params = params
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        needed = zip(ctx.params, ctx.needs_input_grad[1:], strict=True)
        return grad, *(
            torch.empty(p.shape, dtype=p.dtype, device=META) if needs else None
            for p, needs in needed
        )


def _replace_forwards(engine: ZeroEngine) -> None:
    """The forward of the model calls its modules as they were made, and these use their parameters
    alone: there are no activations, and any input will do.
    """
    owned: dict[nn.Module, list[nn.Parameter]] = {}
    for group in engine.groups:
        for module in group.modules:
            owned.setdefault(module, []).extend(group.params)
    called = [module for module in engine.module.modules() if module in owned]
    root = engine.module
    own = owned.get(root, [])
    for module in called:
        module.forward = _using(owned[module])
    rest = [module for module in called if module is not root]

    def forward(values: torch.Tensor) -> torch.Tensor:
        for module in rest:
            values = module(values)
        return _Use.apply(values, *own)

    root.forward = forward


def _using(params: list[nn.Parameter]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: _Use.apply(values, *params)
