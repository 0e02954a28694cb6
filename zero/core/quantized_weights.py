"""The tensors of a quantized layer: packed weights, and the scales and codebooks that decode them.

Libraries keep them in different places: as integer or float8 parameters (bitsandbytes, FP8), inside
a tensor subclass (torchao), in attributes of the parameter or of the layer (bitsandbytes'
`quant_state` and `SCB`, HQQ's `meta`), or as buffers (GPTQ, AWQ). All are frozen, and their bits
must not change, so the engine moves them as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.core.sharded_param import local, owner_of, plain_class

# Smaller scales, codebooks and buffers stay on every rank.
LEAST_BYTES = 2048


class QuantizedTensor(NamedTuple):
    """A tensor with its own bytes, its unique name in the module, and other objects for the same
    bytes: a second tensor over them, or the subclass that wraps the tensor.
    """

    name: str
    tensor: torch.Tensor
    aliases: list[torch.Tensor]


def is_quantized(param: torch.Tensor) -> bool:
    """Whether the elements of this frozen parameter or buffer are codes.

    They are if its class wraps tensors or carries the tensors that decode it, if they are 8-bit
    floats, or if they are many integers of at most 32 bits. Wider integers are indices, and a small
    number of integers may be counters."""
    if param.requires_grad or param.is_meta:
        return False
    if wraps_tensors(param):
        return True
    is_plain = plain_class(param) in (nn.Parameter, torch.Tensor, DTensor)
    if not is_plain and any(True for _ in reachable(public_attributes(param))):
        return True
    if param.is_floating_point():
        return param.element_size() == 1
    is_integer = not (param.is_complex() or param.dtype == torch.bool)
    return is_integer and param.element_size() <= 4 and local(param).nbytes >= LEAST_BYTES


def wraps_tensors(param: torch.Tensor) -> bool:
    """Whether `param` is of a subclass whose values are in other tensors, such as torchao's."""
    return is_traceable_wrapper_subclass(param) and not isinstance(param, DTensor)


def keeps_codes_in_buffers(model: nn.Module) -> bool:
    """Whether transformers has quantized the model, which an adapter may wrap."""
    return any(getattr(module, "is_quantized", False) is True for module in model.modules())


def quantized_tensors(module: nn.Module, buffers: bool | None = False) -> list[QuantizedTensor]:
    """The tensors of `module` itself that are to be sharded as bytes.

    There are none unless one of its frozen parameters or large buffers `is_quantized`. Then they
    are all of its frozen parameters but biases, its large buffers, and the tensors that its
    parameters and its own attributes refer to.

    Args:
        buffers: True for the large buffers of every module, False for none, None for those of
            quantized layers.
    """
    params = dict(module.named_parameters(recurse=False))
    frozen = {name: param for name, param in params.items() if not param.requires_grad}
    large = {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if buffers is not False and buffer.nbytes >= LEAST_BYTES
    }
    is_layer = any(map(is_quantized, [*frozen.values(), *large.values()]))
    sources: dict[str, object] = {}
    if is_layer:
        sources |= {name: param for name, param in frozen.items() if not name.endswith("bias")}
        sources |= public_attributes(module)
    if is_layer or buffers:
        sources |= large
    wrapped = {
        inner: param
        for param in frozen.values()
        if wraps_tensors(param)
        for _, inner in reachable(param)
    }
    found: dict[object, QuantizedTensor] = {}
    for name, tensor in reachable(sources):
        is_param = name in params or tensor in wrapped
        if tensor.is_meta or tensor.requires_grad or tensor.layout is not torch.strided:
            continue
        # torch's own quantized dtypes, which are going away, have a scale besides their bytes.
        if tensor.numel() == 0 or getattr(tensor, "is_quantized", False):
            continue
        key = _memory(tensor)
        if key in found:
            found[key].aliases.append(tensor)
        elif is_param or local(tensor).nbytes >= LEAST_BYTES:
            found[key] = QuantizedTensor(name, tensor, [])
        if tensor in wrapped:
            found[key].aliases.append(wrapped[tensor])
    return list(found.values())


def _memory(tensor: torch.Tensor) -> object:
    """Equal for tensors that show the same bytes in the same way, sharded or not."""
    group = owner_of(tensor)
    if group is not None:
        return group, group.index[tensor]
    part = local(tensor)
    return part.device, part.data_ptr(), part.dtype, part.shape, part.stride()


def public_attributes(owner: object) -> dict[str, object]:
    return {name: value for name, value in vars(owner).items() if not name.startswith("_")}


_OPAQUE = (nn.Module, type, FunctionType, MethodType, ModuleType)


def reachable(
    value: object, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of the tensors in `value` and in what it refers to, each object once."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, _OPAQUE):
        return
    seen.add(id(value))
    items: Mapping = {}
    if isinstance(value, torch.Tensor):
        if wraps_tensors(value):
            inner, _ = cast(Any, value).__tensor_flatten__()
            items = {key: getattr(value, key) for key in inner}
        else:
            yield name, value
            items = public_attributes(value)
    elif isinstance(value, Mapping):
        items = value
    elif isinstance(value, (list, tuple)):
        items = dict(enumerate(value))
    elif hasattr(value, "__dict__"):
        items = public_attributes(value)
    for key, item in items.items():
        yield from reachable(item, f"{name}.{key}" if name else str(key), seen)
