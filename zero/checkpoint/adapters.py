"""PEFT's adapters: the names under which PEFT saves their tensors, and their configuration, so that
`consolidate` can write what `save_pretrained` would have written; and PEFT's merge of adapters into
one base weight at a time."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.core.sharded_param import ShardedParameter, hide, placeholder, show
from zero.errors import UsageError

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


def describe_adapters(model: Any) -> dict[str, dict[str, Any]]:
    """Return each adapter's configuration, and the model's name of each tensor that PEFT saves.

    The name is None where PEFT computes the tensor from several parameters. Nothing is gathered.
    The result is empty if the model is not a PEFT model."""
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return {}
    from peft import get_peft_model_state_dict  # installed, because the model is a PEFT model

    # PEFT selects by name, so a single number, expanded to the shape, can stand for each tensor.
    stand_ins = {
        name: torch.zeros((), device="cpu").expand(value.shape)
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    names = {id(value): name for name, value in stand_ins.items()}
    found = {}
    for adapter, config in model.peft_config.items():
        saved = get_peft_model_state_dict(model, dict(stand_ins), adapter_name=adapter)
        found[adapter] = {
            "config": _stored_config(model, config),
            "tensors": {
                key: names.get(id(value)) or _name_of_equal(model, value)
                for key, value in saved.items()
            },
        }
    return found


def _name_of_equal(model: nn.Module, computed: torch.Tensor) -> str | None:
    """Return the unsharded parameter with these values. For prompts, PEFT returns a copy."""
    for name, param in model.named_parameters():
        is_candidate = param.requires_grad and not isinstance(param, ShardedParameter)
        if is_candidate and param.shape == computed.shape:
            if torch.equal(param.detach().to(computed), computed):
                return name
    return None


def _stored_config(model: Any, config: Any) -> dict[str, Any]:
    """Return what PEFT writes to `adapter_config.json`."""
    config = copy.deepcopy(config)
    config.inference_mode = True
    kind, mapping = type(model.get_base_model()), None
    if config.task_type is None:
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return json.loads((Path(folder) / ADAPTER_CONFIG).read_text())


# -- PEFT's merge


def is_merging(module: nn.Module) -> bool:
    # A wrapper of PEFT has its inner module's attributes, but not in its class.
    return hasattr(type(module), "get_base_layer")


def merging_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_merging(module)]


def merged(layers: Sequence[Any], param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """The base layer's parameter `param` after PEFT's merge, if `value` is its value before, which
    may be overwritten. Meanwhile, the base layer's other parameters are zeros, so that nothing is
    merged into `param` by way of them.
    """
    base = list(dict.fromkeys(p for layer in layers for p in layer.get_base_layer().parameters()))
    former = {other: None if isinstance(other, ShardedParameter) else other.data for other in base}
    for other in base:
        show(other, value if other is param else torch.zeros_like(other, device=value.device))
    try:
        for layer in layers:
            if not getattr(layer, "disable_adapters", False):
                before = layer.get_base_layer()
                with merge_undone(layer):
                    layer.merge()
                if layer.get_base_layer() is not before:
                    raise UsageError(
                        f"PEFT's {type(layer).__name__} replaces a layer when it merges: load the "
                        "whole model, and merge the adapter with merge_and_unload"
                    )
        return param.data
    finally:
        for other, data in former.items():
            if data is None:
                hide(other, placeholder(other.shape, other.dtype, value.device))
            else:
                other.data = data


@contextmanager
def merge_undone(layer: Any) -> Iterator[None]:
    """Context for a `layer.merge()` that the layer does not remember afterwards."""
    before, caches = list(layer.merged_adapters), dict(getattr(layer, "_caches", {}))
    try:
        yield
    finally:
        layer.merged_adapters = before
        if hasattr(layer, "_caches"):
            layer._caches = caches


def base_name(model: nn.Module, name: str) -> str | None:
    """The weight's name in the base model.

    None if a trained copy (PEFT's `modules_to_save`) replaces it.
    """
    owner, _, rest = name.partition(".original_module.")
    if rest:
        if getattr(model.get_submodule(owner), "modules_to_save", None):
            return None
        name = f"{owner}.{rest}"  # some of its rows are trained
    owner, _, rest = name.partition(".modules_to_save.")
    if rest:
        copy, _, rest = rest.partition(".")
        wrapper: Any = model.get_submodule(owner)
        if copy not in wrapper.active_adapters:
            return None
        name = f"{owner}.{rest}"
    parts = name.removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "token_adapter"))
