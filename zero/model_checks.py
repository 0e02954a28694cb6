"""Refuses models that the engine would train wrongly, before any work, by the parameter's name.

[Note: aliases] The engine moves the values of each parameter to memory of its own. A tied parameter
is one object under several names and stays one. Two parameters over the same memory, or a cached
view of a parameter, would silently have different values from then on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from zero.core.param_group import owning_group
from zero.core.quantized_weights import wraps_tensors
from zero.errors import UsageError


class _Span(NamedTuple):
    """The bytes of memory between the first and the last element of a tensor."""

    device: str
    start: int
    end: int
    name: str
    kind: str
    tensor: torch.Tensor


def check_model(model: nn.Module) -> None:
    """Raise UsageError for parameters without values, in a format that cannot be kept, or that
    share memory with other tensors.
    """
    for name, param in model.named_parameters():
        if param.is_meta:
            raise UsageError(
                f"parameter {name!r} is on the meta device and has no values: load them, or use "
                "zero.Init"
            )
    _refuse_formats(model)
    _refuse_aliases(model)


def refuse_doubles(model: nn.Module) -> None:
    """Raise UsageError for a trainable float64 parameter."""
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype == torch.float64:
            raise UsageError(
                f"parameter {name!r} is float64, and masters are fp32: call model.float() first"
            )


# What classes of transformers name to be kept in fp32: in 16 bits, and in fp16.
STRICTLY, IN_FP16 = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"


def kept_in_fp32(
    asking: Iterable[nn.Module], named: Iterable[tuple[str, nn.Parameter]], attribute: str
) -> dict[str, nn.Parameter]:
    """Those of the named parameters that this attribute of a module in `asking` names."""
    names = {name for module in asking for name in getattr(module, attribute, None) or ()}
    if not names:
        return {}
    pattern = re.compile(rf"(^|\.)({'|'.join(map(re.escape, sorted(names)))})($|\.)")
    return {name: p for name, p in named if p.is_floating_point() and pattern.search(name)}


def _refuse_formats(model: nn.Module) -> None:
    """Raise UsageError for parameters that cannot be kept as they are."""
    for name, param in model.named_parameters():
        if param.requires_grad and param.is_complex():
            raise UsageError(
                f"parameter {name!r} is complex: keep its real and imaginary part as one real "
                "parameter (torch.view_as_real), and call torch.view_as_complex in forward"
            )
        if param.requires_grad and wraps_tensors(param):
            raise UsageError(
                f"parameter {name!r} is a {type(param).__name__}, whose values are in other "
                "tensors, so that an optimizer cannot update them in shards: freeze it, and train "
                "an adapter such as LoRA"
            )
        if param.layout is not torch.strided:
            raise UsageError(
                f"parameter {name!r} has the layout {param.layout}, which cannot be cut into "
                "shards: convert it with to_dense()"
            )
    for name, module in model.named_modules():
        meta = getattr(module, "meta", None)
        if isinstance(meta, Mapping) and meta.get("view_as_float"):
            raise UsageError(
                f"layer {name!r} shows its codes as floating-point numbers, which a change of the "
                "dtype would round: quantize with view_as_float=False"
            )
        if hasattr(module, "ct_decompress_hook"):
            raise UsageError(
                "compressed-tensors would decode all layers in the first forward, and each rank "
                "would then hold all of them: load the model with "
                "quantization_config=CompressedTensorsConfig(dequantize=True)"
            )


def _refuse_aliases(model: nn.Module) -> None:
    """Raise UsageError if the memory of a trainable parameter overlaps that of another parameter,
    of a buffer, or of a tensor kept on a module.

    That of frozen parameters may: their values stay equal."""
    reaching: list[_Span] = []
    for span in sorted(_spans(model), key=lambda span: span[:3]):
        # Those before it that end behind its start. Mostly there are none.
        reaching = [e for e in reaching if e.device == span.device and e.end > span.start]
        for earlier in reaching:
            for param, other in ((earlier, span), (span, earlier)):
                if param.kind == "parameter" and param.tensor.requires_grad:
                    _refuse(param, other)
        reaching.append(span)


def _refuse(param: _Span, other: _Span) -> None:
    remedy = (
        "make them one parameter (assign the same object to both modules), or give one of them "
        "memory of its own with clone()"
        if other.kind == "parameter"
        else "compute it in forward, or give it memory of its own with clone()"
    )
    raise UsageError(
        f"{other.kind} {other.name!r} shares the memory of parameter {param.name!r}, whose values "
        f"the engine is about to move, so that the two would come apart: {remedy}"
    )


def _spans(model: nn.Module) -> Iterator[_Span]:
    params = {id(param) for param in model.parameters()}
    for name, param in model.named_parameters():
        yield from _span(name, "parameter", param)
    for name, buffer in model.named_buffers():
        yield from _span(name, "buffer", buffer)
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            # torch's spectral_norm and prune compute this tensor anew in each forward.
            if f"{name}_orig" in module._parameters:
                continue
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in params:
                    yield from _span(f"{prefix}.{name}".lstrip("."), "tensor", tensor)


def _span(name: str, kind: str, tensor: torch.Tensor) -> Iterator[_Span]:
    is_plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    if not is_plain or tensor.is_meta or not tensor.numel() or owning_group(tensor) is not None:
        return
    start = tensor.data_ptr()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    end = start + (last + 1) * tensor.element_size()
    yield _Span(str(tensor.device), start, end, name, kind, tensor)
