"""Builds models with trainable adapters for `zero estimate`: PEFT's adapters, on a base that
bitsandbytes may have quantized.

[Note: bytes of quantized weights]
A weight with n elements in a linear layer (other than the head) takes:

    load_in_4bit    n / 2 codes, and a scale for each 64 elements, which takes 4 bytes, or
                    1 + 4 / 256 with bnb_4bit_use_double_quant
    load_in_8bit    n codes, and 4 bytes for each row

A layer decodes its weight each time it is used, so the weight exists in the model's dtype for that
time, and again in the backward pass. Everything else has the model's dtype, except for experts that
share a parameter: at stage 3 the engine quantizes these as well
(`zero/integrations/hf/quantized_experts.py`)."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.nn import functional

from zero.config import Config
from zero.core.layout import packs_experts
from zero.errors import UsageError
from zero.integrations.hf.quantized_experts import quantize_experts
from zero.tools.estimate.machine import Memory
from zero.tools.estimate.parts import PARAMETERS
from zero.tools.estimate.question import in_a_line

# The number of elements that share a scale, and of scales that share a scale.
BLOCK, NESTED = 64, 256


def quantization_of(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """Return the section `quantization_config`, empty if the weights are not quantized.

    Raises UsageError for any library other than bitsandbytes.
    """
    given = getattr(config, "quantization_config", None) or {}
    found = given if isinstance(given, dict) else given.to_dict()
    if found and found.get("quant_method", "bitsandbytes") != "bitsandbytes":
        raise UsageError(
            f"config.json: quantization_config has quant_method {found['quant_method']!r}, and "
            "only bitsandbytes is estimated: without the section, the model is estimated as one "
            "that is not quantized"
        )
    return found if found.get("load_in_4bit") or found.get("load_in_8bit") else {}


def packed_bytes(weight: torch.Tensor, quantization: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of the codes of a weight (rows x columns), and of their scales."""
    if not quantization.get("load_in_4bit"):
        return weight.numel(), 4 * weight.shape[0]
    blocks = math.ceil(weight.numel() / BLOCK)
    if not quantization.get("bnb_4bit_use_double_quant"):
        return weight.numel() // 2, 4 * blocks
    return weight.numel() // 2, blocks + 4 * math.ceil(blocks / NESTED)


class QuantizedLinear(nn.Linear):
    """A frozen layer with codes instead of a weight, made from a layer on the meta device."""

    def __init__(self, layer: nn.Linear, quantization: dict[str, Any]):
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        codes, scales = packed_bytes(layer.weight, quantization)
        device = layer.weight.device
        packed = torch.empty(codes, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device=device))
        self.bias = layer.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = _Product.apply(input, self.weight, self.out_features)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """Keeps the codes for the backward pass, rather than the weight decoded from them."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, codes: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(codes)
        ctx.shape = rows, values.shape[-1]
        return functional.linear(values, codes.new_zeros(ctx.shape, dtype=values.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (codes,) = ctx.saved_tensors
        return gradient @ codes.new_zeros(ctx.shape, dtype=gradient.dtype), None, None


def quantize(model: Any, quantization: dict[str, Any]) -> None:
    """Replace linear layers by quantized ones, as transformers does when it loads a model."""
    kept = quantization.get("llm_int8_skip_modules") or []
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head and not any(k in name for k in kept):
            model.set_submodule(name, QuantizedLinear(layer, quantization))
    model.is_quantized = True


def _quantize_fused_experts(model: Any) -> None:
    """Quantize experts that share a parameter, as stage 3 does while it loads a model in 4 bits.

    Raises UsageError if bitsandbytes is not installed.
    """
    quantization = quantization_of(model.config) if hasattr(model, "config") else {}
    if not quantization.get("load_in_4bit") or not any(map(packs_experts, model.modules())):
        return
    try:
        from bitsandbytes.functional import name2qmap
    except ImportError as error:
        raise UsageError(
            "config.json: experts in 4 bits are estimated with bitsandbytes: pip install it"
        ) from error
    model.config.quantization_config = transformers.BitsAndBytesConfig.from_dict(quantization)
    with mock.patch.dict(name2qmap):  # discard what it remembers of tensors without values
        quantize_experts(model)


def hold_quantized(model: nn.Module, config: Config, memory: Memory) -> None:
    """Count the codes and scales of quantized weights. Every rank holds all of them, unless the
    engine takes them over.
    """
    with mock.patch.object(memory, "part", PARAMETERS):
        if config.zero_optimization.stage == 3:
            _quantize_fused_experts(model)
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_floating_point():
                memory.note(tensor)


def elements(model: nn.Module) -> int:
    """Count the elements of all parameters; for a quantized weight, those that its codes encode."""
    packed = sum(
        layer.in_features * layer.out_features - layer.weight.numel()
        for layer in model.modules()
        if isinstance(layer, QuantizedLinear)
    )
    return packed + sum(param.numel() for param in model.parameters())


def add_adapter(model: Any, adapter: str) -> None:
    """Add a PEFT adapter to a transformers model, and freeze everything else.

    Args:
        adapter: the folder with adapter_config.json, that file, or a rank, which means LoRA on all
            linear layers except the head.

    Raises UsageError if it cannot be read, or does not fit the model, or if PEFT is not installed.
    """
    try:
        import peft  # here: it is optional
    except ImportError:
        raise UsageError(f"--adapter {adapter}: install PEFT first: pip install peft") from None
    try:
        with warnings.catch_warnings():
            # PEFT's own patterns for fused experts match nothing where "all-linear" excludes them.
            warnings.filterwarnings("ignore", "The following", RuntimeWarning)
            # Not `model.add_adapter`: a new transformers asks for a PEFT that is not out yet.
            peft.inject_adapter_in_model(_adapter_config(adapter), model)
    except Exception as error:  # of any kind: the file is not ours
        raise UsageError(f"--adapter {adapter}: {in_a_line(error)}") from error


def _adapter_config(adapter: str) -> Any:
    import peft  # here: it is optional

    if adapter.isdecimal() and int(adapter) > 0:
        return peft.LoraConfig(r=int(adapter), target_modules="all-linear", lora_dropout=0.0)
    folder = Path(adapter) if Path(adapter).is_dir() else Path(adapter).parent
    if not (folder / "adapter_config.json").is_file():
        raise UsageError(
            "there is no such file: give PEFT's folder with adapter_config.json, or the rank of "
            "LoRA, a number above 0"
        )
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False  # with which a trained adapter is saved
    return config
