"""PEFT's adapters: the names under which PEFT saves their tensors, and their configuration, so that
`consolidate` can write what `save_pretrained` would have written."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.core.sharded_param import ShardedParameter

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
