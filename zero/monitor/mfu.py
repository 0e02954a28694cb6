"""Model FLOPs utilization (MFU): the operations that a model needs per token, and the most that a
device can do.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.comm.communicator import Communicator
from zero.core.layout import packs_experts
from zero.core.param_group import owning_group
from zero.core.quantized_weights import is_quantized
from zero.core.sharded_param import local
from zero.device import is_accelerator
from zero.engine import ZeroEngine

# Forward, and backward for inputs and for weights: two operations for each weight and token.
_TRAINED, _FROZEN = 6, 4


# Dense operations in 1e12 a second by type, by the name that torch gives a device; null: the device
# has no groups for this type. From the vendors' data sheets, without sparsity; 16-bit products are
# summed in fp32. NVIDIA: A100, A10, L4, L40S, H100 (SXM, PCIe and NVL), H200 and H200 NVL, HGX
# B200, V100, T4; white papers on GA102 (RTX 3090) and Ada (RTX 4090). AMD: MI300X; MI250X, of which
# torch sees each half as a device.
PEAKS = json.loads(Path(__file__).with_name("peaks.json").read_text())
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def peak_of(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Dense operations a second of the device with this name, for products of tensors of `dtype`;
    None: not known.

    tf32: fp32 products may be rounded to TF32. A part of a device (MIG) is not known.
    """
    found = (each for pattern, each in PEAKS.items() if re.search(rf"\b{pattern}\b", name))
    peaks = next(found, None)
    if peaks is None or "MIG" in name:
        return None
    kind = "tf32" if tf32 and dtype == torch.float32 and peaks["tf32"] else _TYPES.get(dtype)
    return peaks[kind] * 1e12 if kind and peaks[kind] else None


def peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """`peak_of` the device that computes, with its present setting for fp32 products."""
    if not is_accelerator(device):
        return None
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return None if name is None else peak_of(name(device), dtype, tf32)


def operations_per_token(engine: ZeroEngine) -> tuple[int, int]:
    """Operations of forward and backward on this rank: for a token of `input_ids`, and for a token
    of the decoder, if there is one.

    2 for each weight in forward, and in backward 2 for the gradient of the inputs, and 2 for that
    of the weight unless it is frozen. Weights that are only looked up (`nn.Embedding`) do not
    count. Of packed experts as many count as a token chooses (`num_experts_per_tok`). Products of
    two activations, as in attention, and recomputation do not count."""
    model: Any = engine.module
    config = getattr(model, "config", None)
    two = getattr(config, "is_encoder_decoder", False) and hasattr(model, "get_encoder")
    encoder = set(model.get_encoder().modules()) if two else set(model.modules())
    active = partial(_active, getattr(config, "num_experts_per_tok", None), engine.comm.model)
    found = [0.0, 0.0]
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            found[module not in encoder] += active(module) * _of_weights(module)
    return round(found[0]), round(found[1])


def _active(chosen: int | None, model: Communicator | None, module: nn.Module) -> float:
    """The part of the module's weights that a token uses."""
    if not chosen or not packs_experts(module):
        return 1.0
    # Under expert parallelism the module's number is this rank's.
    ranks = model.world_size if model and getattr(module, "_is_expert_parallel", False) else 1
    experts: Any = module.num_experts
    return min(1.0, chosen / (experts * ranks))


def _of_weights(module: nn.Module) -> int:
    own = list(module.parameters(recurse=False))
    if any(map(is_quantized, own)) and isinstance(module, nn.Linear):
        # Two codes of 4 bits are one element of the parameter, and scales are parameters, too.
        return _FROZEN * module.in_features * module.out_features
    return sum((_TRAINED if param.requires_grad else _FROZEN) * _numel(param) for param in own)


def _numel(param: nn.Parameter) -> int:
    """The number of elements on this rank before ZeRO shards them."""
    group = owning_group(param)
    if group is None or group.packed:
        return local(param).numel()
    return group.layout.slots[group.index[param]].numel
