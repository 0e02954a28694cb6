"""A second object of the user's optimizer, for calls that must not change the first one.

There is no way to copy an optimizer of any class, so a twin is made without a constructor. It
shares the settings, hooks and state of the original unless it gets others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

# What torch and its schedulers keep on an optimizer, and what is looked at by itself.
_NOT_COUNTED = {"_step_count", "_opt_called", "param_groups", "params", "state"}


def twin_of(optimizer: torch.optim.Optimizer, **attributes: object) -> torch.optim.Optimizer:
    """An optimizer of the same class, with these attributes instead of the original's."""
    twin = object.__new__(type(optimizer))
    twin.__dict__ |= optimizer.__dict__ | attributes
    twin.__dict__.pop("step", None)  # torch's schedulers put a counting one there
    return twin


def counting_twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A twin that counts by itself: steps, learning rates and flags in its param groups and
    attributes. It shares the entries of `state`.
    """
    groups = [group | _copied(group) for group in optimizer.param_groups]
    return twin_of(optimizer, **_copied(vars(optimizer)), param_groups=groups)


def counts_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What an optimizer counts outside of its parameters' state, by name: numbers in param groups,
    attributes and entries of `state` that belong to no parameter, also in dicts, lists and tuples.

    Each is a text, because a NaN then equals itself.
    """
    places: dict[str, Mapping] = {
        f"param group {number},": group for number, group in enumerate(optimizer.param_groups)
    }
    places |= {"attribute": vars(optimizer), "state": optimizer.state}
    return dict(
        leaf
        for name, place in places.items()
        for key, value in place.items()
        if _is_count(key, value)
        for leaf in _leaves(f"{name} {key}", value)
    )


def _copied(place: Mapping) -> dict[Any, Any]:
    return {key: copy.deepcopy(value) for key, value in place.items() if _is_count(key, value)}


def _leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{name} {key}", each)
    else:
        number = value.item() if isinstance(value, (torch.Tensor, numpy.generic)) else value
        yield name, repr(number)


def _is_count(key: object, value: object) -> bool:
    """Whether `value` is a number, a text or None, or consists of such, and is no parameter's."""
    if not isinstance(key, (str, int)) or key in _NOT_COUNTED:
        return False
    if isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return all(_is_count(inner, each) for inner, each in items)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not isinstance(value, nn.Parameter)
    return value is None or isinstance(value, (bool, int, float, str, numpy.generic))
