"""Reads the model of an estimate from its folder, builds it without values, and calls it for one
micro-batch."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from zero.config import Config
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.tools.estimate.adapters import add_adapter, quantization_of, quantize
from zero.tools.estimate.calls import META
from zero.tools.estimate.machine import Memory
from zero.tools.estimate.question import Question, in_a_line, model_folder

MOST_LAYERS = 10_000
_REMEDY = "leave --batch and --seq out, then activations are not counted"


def read_config(source: str) -> transformers.PretrainedConfig:
    """Read the configuration from a model's folder, or from a file `config.json`.

    Raises UsageError if there is none.
    """
    folder = model_folder(source)
    try:
        json.loads((folder / "config.json").read_text())
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        class_of(config)
        layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
        if not 0 <= layers <= MOST_LAYERS:
            raise UsageError(f"num_hidden_layers is {layers}, expected at most {MOST_LAYERS:,}")
    except json.JSONDecodeError as error:
        raise UsageError(f"{folder / 'config.json'}: not valid JSON: {error}") from error
    except Exception as error:  # of any kind: the file is not ours
        raise UsageError(f"{source}: {in_a_line(error)}") from error
    return config


def class_of(config: transformers.PretrainedConfig) -> type[transformers.PreTrainedModel]:
    """Return the class that `architectures` names.

    Raises UsageError if transformers has none of this name.
    """
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    raise UsageError(
        f"config.json: architectures is {config.architectures}, expected the name of a model in "
        "transformers, such as LlamaForCausalLM"
    )


def fill_in(config: Config, shape: transformers.PretrainedConfig) -> Config:
    """Replace "auto" by the values of transformers: sizes from the hidden size, and bf16."""
    zero, auto = config.zero_optimization, config.origin.auto
    if "zero_optimization.stage" in auto:
        raise UsageError(
            "zero_optimization.stage is 'auto': give the stage as a number to have it estimated"
        )
    text = shape.get_text_config()
    hidden = getattr(text, "hidden_size", None) or getattr(text, "d_model", 0)
    sizes = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": hidden * hidden * 9 // 10,
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    changed = {key: value for key, value in sizes.items() if f"zero_optimization.{key}" in auto}
    filled: dict[str, Any] = {"zero_optimization": zero.model_copy(update=changed)}
    if "bf16.enabled" in auto and not config.fp16.enabled:
        filled["bf16"] = config.bf16.model_copy(update={"enabled": True})
    return config.model_copy(update=filled)


def build(
    config: transformers.PretrainedConfig,
    dtype: torch.dtype,
    adapter: str = "",
) -> transformers.PreTrainedModel:
    """Build the model in this dtype on the meta device, with an adapter if one is named.

    Raises UsageError if its constructor refuses the configuration, or needs values.
    """
    kind = class_of(config)
    quantization = quantization_of(config)
    if quantization and not adapter:
        raise UsageError(
            "config.json: quantized weights (quantization_config) are frozen; name the adapter "
            "that is trained with --adapter, for example --adapter 16 for LoRA of that rank"
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # `init_weights` also ties parameters.
        with META, Memory(""), no_init_weights():
            model = kind(config)
            model.tie_weights()
            if quantization:
                quantize(model, quantization)
    except Exception as error:  # of any kind: the constructor is not ours
        name = kind.__name__
        raise UsageError(f"config.json: {name} cannot be built: {in_a_line(error)}") from error
    finally:
        torch.set_default_dtype(before)
    if adapter:
        with META, Memory(""):
            add_adapter(model, adapter)
    return model.train()


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
    """Enable gradient checkpointing of a transformers model without dropout."""
    with warnings.catch_warnings():
        # transformers 5.23 has new names for it.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


def micro_batch(engine: ZeroEngine, question: Question) -> Callable[[], torch.Tensor]:
    """Return a function that runs the forward of a micro-batch and returns the loss. It raises
    UsageError if the model's forward fails.
    """
    if not (question.batch and question.length):
        replace_forwards(engine)
        return lambda: engine(torch.zeros(1, device=META, requires_grad=True)).sum()
    model = engine.module
    require_tokens(model, question.length)
    ids = torch.zeros(question.batch, question.length, dtype=torch.long, device=META)
    labels = ids[:, 0] if type(model).__name__.endswith("ForSequenceClassification") else ids

    def loss() -> torch.Tensor:
        try:
            return engine(input_ids=ids, labels=labels, use_cache=False).loss
        except Exception as error:  # of any kind: the forward is not ours
            name, why = type(model).__name__, in_a_line(error)
            raise UsageError(
                f"{name} does not take input_ids and labels ({why}): {_REMEDY}"
            ) from error

    return loss


def require_tokens(model: nn.Module, length: int) -> None:
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


def replace_forwards(engine: ZeroEngine) -> None:
    """Make the forward call all modules in their order in the model, and let each use only its own
    parameters. There are no activations, and any input will do.
    """
    owned: dict[nn.Module, list[nn.Parameter]] = {engine.module: []}
    for group in engine.groups:
        for module in group.modules or [engine.module]:
            owned.setdefault(module, []).extend(group.params)
    called = [module for module in engine.module.modules() if module in owned]

    def using(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        trained = (param for param in owned[module] if param.requires_grad)
        # A new tensor even if nothing is trained: an output that is the input would end no use.
        return sum((param.sum() for param in trained), start=values.clone())

    def forward(values: torch.Tensor) -> torch.Tensor:
        for module in called[1:]:
            values = module(values)
        return using(engine.module, values)

    for module in called:
        module.forward = forward if module is engine.module else partial(using, module)
