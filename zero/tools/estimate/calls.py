"""Single torch calls on a device that computes nothing: what they produce, and what they cost.

A step has thousands of calls, but only some hundred different ones, because layers repeat, and so
do the steps of different configurations. torch therefore derives the shapes of each call once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

META = torch.device("meta")

_aten = torch.ops.aten
# Whether a tensor is on the imitated device. The context `imitated` replaces `Tensor.is_meta`.
is_on_device: Callable[[torch.Tensor], bool] = vars(torch._C.TensorBase)["is_meta"].__get__
FILLS = (_aten.zeros.default, _aten.ones.default, _aten.full.default)
# torch's formulas, and those that it lacks: fused attention on CPUs, where a causal mask saves
# nothing, and experts.
_FORMULAS = flop_registry | {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: (
        4 * q.numel() * k.shape[-2]
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, *_, **__: (
        10 * q.numel() * k.shape[-2]
    ),
    _aten._grouped_mm: lambda a, b, *_, **__: 2 * a.numel() * b.shape[-1],
}


def operations(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Return the floating-point operations of one call. Only matrix products count."""
    formula = _FORMULAS.get(getattr(func, "overloadpacket", func))
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)


class Call(NamedTuple):
    """The result of a call on device tensors.

    Attributes:
        outputs: the outputs, with shape, stride and dtype in place of each tensor. None: the next
            such call must be executed, too, because some of them are views.
        operations: its floating-point operations, if it is a matrix product.
        touched: the bytes that it reads and writes.
    """

    outputs: Any
    operations: int
    touched: int

    @classmethod
    def of(cls, func: Any, args: tuple, kwargs: dict, out: Any) -> Call:
        inputs, made = tensors_in((args, kwargs)), tensors_in(out)
        count, touched = operations(func, args, kwargs, out), 0
        if func.namespace in ("aten", "bitsandbytes"):
            moved = inputs + made if inputs or func in FILLS else []
            touched = sum(each.nbytes for each in moved if is_on_device(each))
        given = {each.untyped_storage()._cdata for each in inputs}
        of_others = (each.untyped_storage()._cdata in given for each in made)  # `_unsafe_view`
        is_new = all(map(_is_whole, made)) and not any(of_others)
        return cls(_shapes(out) if is_new else None, count, touched)


_known: dict[Any, Call] = {}


def derived(
    execute: Callable[[Any, tuple, dict], Any], func: Any, args: tuple, kwargs: dict
) -> tuple[Any, Call]:
    """Return the result of a call, and what it costs. It is executed unless it is known."""
    key = key_of(func, args, kwargs)
    if (call := _known.get(key)) is not None:
        return like(call.outputs), call
    out = execute(func, args, kwargs)
    call = Call.of(func, args, kwargs, out)
    if key is not None and call.outputs is not None:
        _known[key] = call
    return out, call


@functools.cache
def _takes_tensors(func: Any) -> bool | None:
    """Whether an operation has arguments that are tensors. None: its calls must be executed,
    because it changes a tensor, or returns a value.
    """
    schema = func._schema
    if func.namespace != "aten" or schema.is_mutable or func is _aten._local_scalar_dense.default:
        return None
    return any("Tensor" in str(each.type) for each in schema.arguments)


def key_of(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return what the result of the call depends on, or None if the call must be executed, because
    it changes a tensor, or because one of its tensors is not on the device.
    """
    takes_tensors = _takes_tensors(func)
    if takes_tensors is None:
        return None
    device = kwargs.get("device")
    if not takes_tensors if device is None else torch.device(device).type != META.type:
        return None
    try:
        options = tuple([(name, _shapes(value)) for name, value in kwargs.items()])
        return func, _shapes(args), options, torch.get_default_dtype()
    except ValueError:
        return None


class _Shape(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _shapes(value: Any) -> Any:
    """Replace each tensor in the value by its shape, stride and dtype. Raises ValueError for a
    tensor in host memory.
    """
    if isinstance(value, torch.Tensor):
        if not is_on_device(value):
            raise ValueError("a tensor in host memory")
        return _Shape(value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple([_shapes(each) for each in value])
    return type(value), value  # 1, 1.0 and True are equal, but lead to different dtypes


def like(shapes: Any) -> Any:
    """Make new tensors of these shapes."""
    if isinstance(shapes, _Shape):
        shape, stride, dtype = shapes
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)
    if shapes and isinstance(shapes[0], type):
        return shapes[1]
    return tuple(map(like, shapes))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments or results of a call."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for each in value for tensor in tensors_in(each)]


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether the tensor and its whole storage are on the device."""
    return is_on_device(tensor) and tensor.nbytes == tensor.untyped_storage().nbytes()
