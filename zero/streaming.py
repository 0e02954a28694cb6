"""Weights for an inference engine. Every rank gets them one by one, in bounded memory; adapters are
merged on request.

Adapters are those of PEFT, recognised by their interface: nothing of PEFT is imported. This file
knows nothing of how weights are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zero.checkpoint.export import Weights
from zero.core.gathered_parameters import GatheredParameters
from zero.engine import ZeroEngine
from zero.errors import UsageError


def stream_weights(
    engine: ZeroEngine,
    dtype: torch.dtype | str | None = None,
    max_bytes: int = 1 << 30,
    merge_adapters: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass over all weights: (name, tensor on the compute device) for each, the next ones being
    gathered meanwhile.

    All ranks must iterate at the same time, and stop at the same weight. A tensor is valid until
    the next one is asked for and must not be changed. Tied weights come once, under their first
    name. Persistent buffers come last.

    Args:
        dtype: of floating-point weights: a torch dtype, "fp16", "bf16" or "fp32"; None: the one
            they are trained in.
        max_bytes: of the two buffers in all; more where a single weight is larger than half of it.
        merge_adapters: add active PEFT adapters to their base weights, under the base model's
            names, instead of passing both. Whole adapters (not their base weights) are gathered for
            that time, beyond `max_bytes`.

    Raises:
        ValueError: for a dtype of another name, or an adapter whose merged weight is not a sum
            (DoRA, IA3).
    """
    if not merge_adapters:
        yield from Weights(engine.module, engine.groups, engine.comm, dtype).stream(max_bytes)
        return
    layers = _adapter_layers(engine.module)
    kept_apart = {
        f"{name}.{key}": param
        for name, layer in layers.items()
        for key, param in layer.named_parameters()
        if not key.startswith("base_layer.")
    }
    target = Weights(engine.module, engine.groups, engine.comm, dtype).dtype
    with torch.no_grad(), GatheredParameters(kept_apart.values()):
        for name, value in Weights(engine.module, engine.groups, engine.comm).stream(max_bytes):
            if name in kept_apart or (base_name := _base_name(engine.module, name)) is None:
                continue
            owner, _, kind = name.rpartition(".base_layer.")
            if owner in layers and kind == "weight":
                value = _merged(layers[owner], value)
            yield (
                base_name,
                value.to(target) if target is not None and value.is_floating_point() else value,
            )


def _adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have a base layer and adapters.

    Raises UsageError where a sum does not merge them.
    """
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if hasattr(module, "base_layer")
    }
    for name, layer in layers.items():
        biased = any(getattr(layer, "lora_bias", {}).values())
        if not hasattr(layer, "get_delta_weight") or getattr(layer, "lora_variant", None) or biased:
            raise UsageError(
                f"stream_weights: the adapter of {name!r} ({type(layer).__name__}) is not a sum "
                "with its base weight: "
                "call merge_adapter() inside GatheredParameters(model.parameters()), or pass "
                "merge_adapters=False"
            )
    return layers


def _merged(layer: Any, base: torch.Tensor) -> torch.Tensor:
    if getattr(layer, "disable_adapters", False):
        return base
    own = {adapter for names in layer.adapter_layer_names for adapter in getattr(layer, names)}
    merged = base.clone()
    for adapter in layer.active_adapters:
        if adapter in own and adapter not in layer.merged_adapters:
            merged += layer.get_delta_weight(adapter)
    return merged


def _base_name(model: nn.Module, name: str) -> str | None:
    """The weight's name in the base model.

    None if a trained copy (PEFT's `modules_to_save`) stands in for it.
    """
    owner, _, rest = name.partition(".original_module.")
    if rest and getattr(model.get_submodule(owner), "modules_to_save", None):
        return None
    owner, _, rest = name.partition(".modules_to_save.")
    if rest:
        copy, _, rest = rest.partition(".")
        wrapper: Any = model.get_submodule(owner)
        if copy not in wrapper.active_adapters:
            return None
        name = f"{owner}.{rest}"
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
