"""PEFT's adapters in files: the names under which PEFT saves their tensors."""

from __future__ import annotations

from typing import Any

import torch

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


def names_in_peft(model: Any) -> dict[str, str]:
    """Return the model's name of each tensor that PEFT saves, by its name in PEFT's file, but for
    those that PEFT computes. The result is empty if the model is not a PEFT model.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return {}
    from peft import get_peft_model_state_dict  # installed, because the model is a PEFT model

    # PEFT selects by name, so a single number, expanded to the shape, can stand for each tensor.
    stand_ins = {
        name: torch.zeros((), device="cpu").expand(value.shape)
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    names, found = {id(value): name for name, value in stand_ins.items()}, {}
    for adapter in model.peft_config:
        saved = get_peft_model_state_dict(model, dict(stand_ins), adapter_name=adapter)
        found |= {key: names[id(value)] for key, value in saved.items() if id(value) in names}
    return found
