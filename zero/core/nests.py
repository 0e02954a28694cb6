"""Finds the tensors in what modules take, return and keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.core.param_group import ParamGroup
from zero.core.sharded_param import PlaceholderView, local


def tensors_in(
    value: object, in_objects: bool = False, known: set[int] | None = None
) -> Iterator[torch.Tensor]:
    """The tensors in a nest of tuples, lists, sets, mappings and dataclasses.

    `in_objects`: also those in attributes of any other object, except modules. `known`: the `id`s
    of objects not to look into; the objects that were looked into are added to it."""
    known = set() if known is None else known
    items: Iterable[object]
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (tuple, list, set, frozenset)):
        items = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif (is_dataclass(value) and not isinstance(value, type)) or (
        in_objects and not isinstance(value, _WITHOUT_RESULTS)
    ):
        items = _attributes(value)
    else:
        return
    if id(value) in known:
        return
    known.add(id(value))
    for item in items:
        yield from tensors_in(item, in_objects, known)


_WITHOUT_RESULTS = (str, bytes, int, float, type(None), type, nn.Module, FunctionType, ModuleType)


def _attributes(value: object) -> list[object]:
    """What an object keeps, in its `__dict__` or in slots."""
    slots: list[str] = []
    for kind in type(value).__mro__:
        names = getattr(kind, "__slots__", ())
        slots += [names] if isinstance(names, str) else names
    kept = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*kept, *getattr(value, "__dict__", {}).values()]


def tensors_with_grad(value: object, **options: Any) -> Iterator[torch.Tensor]:
    """Those of `tensors_in` that require grad."""
    return (tensor for tensor in tensors_in(value, **options) if tensor.requires_grad)


def groups_shown_by(value: object, groups: Sequence[ParamGroup]) -> list[ParamGroup]:
    """Those of `groups` whose parameters, or views of them, are in `value`: a module may return
    them, or keep them.
    """
    tensors = [local(tensor) for tensor in tensors_in(value, in_objects=True)]
    # By the object, because storages that are freed have no address. The result of a collective
    # that is not awaited yet has no storage of its own.
    storages = {
        tensor.untyped_storage()._cdata
        for tensor in tensors
        if tensor.layout is torch.strided
        and not isinstance(tensor, PlaceholderView)
        and not is_traceable_wrapper_subclass(tensor)
        and not is_functorch_wrapped_tensor(tensor)
    }
    return [group for group in groups if group.full.untyped_storage()._cdata in storages]


def with_base(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor and, if it is a view, its base: a write to a view gives the view another node."""
    yield tensor
    if tensor._base is not None:
        yield tensor._base


def kept_by(module: nn.Module) -> list[object]:
    """What scripts have put on the module and on those inside of it: attributes and buffers."""
    usual = vars(nn.Module())
    return [
        value
        for part in module.modules()
        for name, value in (*vars(part).items(), *part._buffers.items())
        if name not in usual
    ]
