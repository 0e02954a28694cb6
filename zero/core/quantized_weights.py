"""The tensors of a quantized layer: packed weights, and the scales and codebooks that decode them.

Libraries keep them in different places: as integer or float8 parameters (bitsandbytes, FP8), inside
of a tensor subclass (torchao), or as attributes of the parameter or of the layer (the `quant_state`
and `SCB` of bitsandbytes). All are frozen, and their bits must not change. So the engine moves them
as bytes. This file knows nothing of groups' states or of communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.core.sharded_param import owning_group

# Smaller scales and codebooks stay on every rank: a collective for them costs more than it saves.
LEAST_BYTES = 2048


class QuantizedTensor(NamedTuple):
    """A tensor with bytes of its own, and other objects that show the same bytes."""

    name: str
    tensor: torch.Tensor
    aliases: list[torch.Tensor]


def is_quantized(param: nn.Parameter) -> bool:
    """Whether `param` is frozen and its elements are codes: integers, 8-bit floats, a tensor
    subclass, or a parameter that carries the tensors that decode it.
    """
    if param.requires_grad or param.is_meta or isinstance(param, DTensor):
        return False
    return (
        not param.is_floating_point()
        or param.element_size() == 1
        or is_traceable_wrapper_subclass(param)
        or any(True for _ in _reachable(_public(param), "", set()))
    )


def quantized_tensors(module: nn.Module) -> list[QuantizedTensor]:
    """The tensors of `module` itself that are to be sharded as bytes; none if no parameter
    `is_quantized`.

    They are all of its frozen parameters and whatever its parameters and its own attributes refer
    to, but for tensors of fewer than `LEAST_BYTES`. Their names are unique in the module."""
    params = dict(module.named_parameters(recurse=False))
    if not any(is_quantized(param) for param in params.values()):
        return []
    seen: set[int] = set()
    found: dict[object, QuantizedTensor] = {}
    sources: dict[str, object] = {
        name: param for name, param in params.items() if not param.requires_grad
    }
    for name, tensor in _reachable(sources | _public(module), "", seen):
        is_param = name in params
        if tensor.numel() == 0 or tensor.is_meta or tensor.requires_grad:
            continue
        if not is_param and tensor.nbytes < LEAST_BYTES:
            continue
        key = _memory(tensor)
        if key in found:
            found[key].aliases.append(tensor)
        else:
            found[key] = QuantizedTensor(name, tensor, [])
    return list(found.values())


def _memory(tensor: torch.Tensor) -> object:
    """Equal for tensors that show the same bytes in the same way, sharded or not."""
    group = owning_group(tensor)
    if group is not None:
        return group, group.index[tensor]
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _public(owner: object) -> dict[str, object]:
    return {name: value for name, value in vars(owner).items() if not name.startswith("_")}


_OPAQUE = (nn.Module, type, FunctionType, MethodType, ModuleType)


def _reachable(value: object, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of the tensors in `value` and in what it refers to, each object once."""
    if id(value) in seen or isinstance(value, _OPAQUE):
        return
    seen.add(id(value))
    items: Mapping = {}
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            inner, _ = value.__tensor_flatten__()
            items = {key: getattr(value, key) for key in inner}
        else:
            yield name, value
            items = _public(value)
    elif isinstance(value, Mapping):
        items = value
    elif isinstance(value, (list, tuple)):
        items = dict(enumerate(value))
    elif hasattr(value, "__dict__"):
        items = _public(value)
    for key, item in items.items():
        yield from _reachable(item, f"{name}.{key}" if name else str(key), seen)
