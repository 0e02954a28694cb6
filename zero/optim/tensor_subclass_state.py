"""Optimizer state in tensors that wrap others, such as torchao's 8-bit moments: opened to plain
tensors, and closed.

The protocol is torch's for traceable wrapper subclasses (`__tensor_flatten__`,
`__tensor_unflatten__`). Between steps state is kept open. So whoever moves, counts or stores it
sees ordinary tensors only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.errors import UsageError

_KIND = "wrapper of tensors"


def opened(value: Any) -> Any:
    """`value`, with each wrapper in it, also in lists, tuples and dicts, as a dict of what it
    wraps.
    """
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        kind = type(value)
        return {
            _KIND: f"{kind.__module__}:{kind.__qualname__}",
            "tensors": {name: opened(getattr(value, name)) for name in names},
            "context": context,
            "size": tuple(value.shape),
            "stride": tuple(value.stride()),
        }
    return _in_containers(opened, value)


def closed(value: Any) -> Any:
    """The inverse of `opened`. Raises UsageError for a class that this process has not imported."""
    if isinstance(value, dict) and _KIND in value:
        tensors = {name: closed(each) for name, each in value["tensors"].items()}
        make = _class(value[_KIND]).__tensor_unflatten__
        return make(tensors, value["context"], torch.Size(value["size"]), value["stride"])
    return _in_containers(closed, value)


def _in_containers(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    return value


def _class(name: str) -> type:
    """The wrapper class of this name.

    A name may come from a file, so nothing is imported for it.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (
        isinstance(found, type)
        and issubclass(found, torch.Tensor)
        and hasattr(found, "__tensor_unflatten__")
    ):
        raise UsageError(
            f"optimizer state in tensors of class {name}: this process has no such class; import it"
        )
    return found
