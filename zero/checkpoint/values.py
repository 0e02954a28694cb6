"""Converts Python values to JSON and back, exactly and without pickle: the parts of a training
state that are not large tensors.

None, bool, int, float, str, lists and dicts with string keys are JSON's own types. Anything else
becomes an object with the single key `KIND`, which names its type and describes it. Floats survive
bit for bit, because Python prints the shortest digits that read back as the same number."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch

from zero.checkpoint.manifest import KIND
from zero.errors import UsageError


def encode(value: object, place: str) -> object:
    """Convert `value` for `json.dumps`. `place` says in errors where the value came from.

    Raises:
        UsageError: for a type that cannot be stored, with its place.
    """
    match value:
        case None | bool():
            return value
        # A subclass, such as an enum of strings or numpy's float64, is stored as the plain value.
        case int():
            return int(value)
        case float():
            return float(value)
        case str():
            return str.__str__(value)
        case dict() if all(type(key) is str and key != KIND for key in value):
            return {key: encode(item, f"{place}.{key}") for key, item in value.items()}
        case dict():
            keys = [encode(key, f"a key of {place}") for key in value]
            items = [encode(item, f"{place}[{key!r}]") for key, item in value.items()]
            return {KIND: "dict", "items": list(map(list, zip(keys, items, strict=True)))}
        case list() | tuple():
            items = [encode(item, f"{place}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {KIND: "tuple", "items": items}
        case torch.dtype():
            return {KIND: "dtype", "name": dtype_name(value)}
        case bytes():
            return {KIND: "bytes", "data": base64.b64encode(value).decode()}
        case torch.Tensor():
            data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return _described("tensor", dtype_name(value.dtype), value.shape, data)
        case numpy.generic():
            return encode(value.item(), place)
        case numpy.ndarray() if value.dtype.kind in "biufc":
            return _described("array", value.dtype.str, value.shape, value.tobytes())
    raise UsageError(
        f"{place}: a {type(value).__name__} cannot be stored in a checkpoint; use numbers, "
        "strings, lists, dicts, tuples, bytes, tensors or arrays"
    )


def _described(kind: str, dtype: str, shape: Sequence[int], data: bytes) -> dict:
    content = {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(data).decode()}
    return {KIND: kind, **content}


def describe(
    value: object, tensors: list[torch.Tensor], place: str, package: str | None = None
) -> object:
    """Like `encode`, but tensors, also those in lists, tuples and dicts, are appended to `tensors`,
    and the result has their shapes. Objects of plain classes of `package`, such as GaLore's
    projectors, are described by their attributes.
    """
    inner = partial(describe, tensors=tensors, package=package)
    match value:
        case torch.Tensor() if value.numel() > 1:
            tensors.append(value)
            return {"tensor": [len(tensors) - 1, list(value.shape)]}
        case list() | tuple():
            items = [inner(item, place=f"{place}[{i}]") for i, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        case dict():
            items = [
                [encode(key, place), inner(item, place=f"{place}.{key}")]
                for key, item in value.items()
            ]
            return {"dict": items}
        case _ if _class_in(package, type(value).__module__, type(value).__name__) is type(value):
            attributes = inner(vars(value), place=place)
            return {"object": [type(value).__module__, type(value).__name__, attributes]}
    return {"value": encode(value, place)}


def _class_in(package: str | None, module: str, name: str) -> type | None:
    """Return a class from an imported module of `package`, if its objects consist only of their
    attributes, so that creating one from them runs none of its code.
    """
    found = getattr(sys.modules.get(module), name, None)
    is_inside = package is not None and module.partition(".")[0] == package
    if not is_inside or not isinstance(found, type) or found.__new__ is not object.__new__:
        return None
    return None if hasattr(found, "__del__") or not hasattr(found, "__dict__") else found


def rebuild(
    description: dict,
    tensor: Callable[[int, list[int]], torch.Tensor],
    package: str | None = None,
) -> object:
    """The inverse of `describe`. `tensor` returns the tensor with this number and shape."""
    inner = partial(rebuild, tensor=tensor, package=package)
    ((kind, content),) = description.items()
    if kind == "tensor":
        return tensor(*content)
    if kind == "dict":
        return {decode(key): inner(item) for key, item in content}
    if kind == "object":
        module, name, attributes = content
        if (kind_of_object := _class_in(package, module, name)) is None:
            raise ValueError(
                f"the checkpoint has an object of {module}.{name}, which the optimizer's package "
                "lacks: use the version that trained"
            )
        made = object.__new__(kind_of_object)
        vars(made).update(inner(attributes))
        return made
    if kind == "value":
        return decode(content)
    items = [inner(item) for item in content]
    return items if kind == "list" else tuple(items)


def decode(value: object) -> Any:
    """The inverse of `encode`. Raises ValueError for anything that `encode` cannot have made."""
    try:
        return _decode(value)
    except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"a value in a checkpoint is not what was stored: {type(error).__name__}: {error}"
        ) from error


def _decode(value: object) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(KIND):
        case None:
            return {key: _decode(item) for key, item in value.items()}
        case "tuple":
            return tuple(_decode(item) for item in value["items"])
        case "dict":
            return {_decode(key): _decode(item) for key, item in value["items"]}
        case "dtype":
            return dtype_of(value["name"])
        case "bytes":
            return base64.b64decode(value["data"])
        case "tensor":
            tensor = torch.empty(value["shape"], dtype=dtype_of(value["dtype"]), device="cpu")
            data = numpy.frombuffer(base64.b64decode(value["data"]), dtype=numpy.uint8)
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(data.copy()))
            return tensor
        case "array":
            flat = numpy.frombuffer(base64.b64decode(value["data"]), dtype=value["dtype"])
            return flat.reshape(value["shape"]).copy()
        case kind:
            raise ValueError(f"unknown type {kind!r} in a checkpoint; a newer version wrote it")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. Raises ValueError if no dtype has this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r} in a checkpoint")
    return dtype
