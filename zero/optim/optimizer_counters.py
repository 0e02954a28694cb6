"""What an optimizer counts outside of its state: steps, learning rates, flags.

It stands in the param groups, in attributes, and in entries of `state` that belong to no parameter:
numbers, also in dicts, lists and tuples. An optimizer that gets its tensors in several calls must
find the same in each of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import numpy
import torch
from torch import nn

# What torch and its schedulers keep on an optimizer, and what is looked at by itself.
_NOT_COUNTED = {"_step_count", "_opt_called", "param_groups", "params", "state"}
# {place: {key: value}}
Counts = dict[str, dict[object, object]]


def counts_of(optimizer: torch.optim.Optimizer) -> Counts:
    """A copy of all that is counted."""
    return {
        name: {
            key: copy.deepcopy(value)
            for key, value in place.items()
            if _looks_at(key) and _counts(value)
        }
        for name, place in _places(optimizer).items()
    }


@torch.no_grad()
def restore(optimizer: torch.optim.Optimizer, before: Counts) -> None:
    """Bring back what was counted `before`, and delete what has been added.

    Tensors, lists and dicts stay objects.
    """
    for name, place in _places(optimizer).items():
        former = before.get(name, {})
        for key, value in list(place.items()):
            if not (_looks_at(key) and _counts(value)):
                continue
            if key not in former:
                del place[key]
            elif repr(value) != repr(former[key]):
                place[key] = _with_value(value, copy.deepcopy(former[key]))


def _with_value(kept: object, value: object) -> object:
    """`kept` with the value `value`, which is returned itself if that is impossible."""
    if isinstance(kept, torch.Tensor) and isinstance(value, torch.Tensor):
        return kept.copy_(value)
    if isinstance(kept, list) and isinstance(value, list):
        kept[:] = value
        return kept
    if isinstance(kept, dict) and isinstance(value, dict):
        kept.clear()
        kept.update(value)
        return kept
    return value


def flat(counts: Counts) -> dict[str, str]:
    """Each number as text, by the name of its place. As text a NaN equals itself."""
    return dict(leaf for place, values in counts.items() for leaf in _leaves(place, values))


def _leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{name} {key}", each)
    else:
        yield (
            name,
            repr(value.item() if isinstance(value, (torch.Tensor, numpy.generic)) else value),
        )


def _places(optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    groups = {
        f"param group {number},": group for number, group in enumerate(optimizer.param_groups)
    }
    return groups | {"attribute": vars(optimizer), "state": optimizer.state}


def _looks_at(key: object) -> bool:
    """Not the state of parameters, for instance."""
    return isinstance(key, (str, int)) and key not in _NOT_COUNTED


def _counts(value: object) -> bool:
    """Whether it is a number, a text or None, or consists of such."""
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and _counts(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_counts, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not isinstance(value, nn.Parameter)
    return value is None or isinstance(value, (bool, int, float, str, numpy.generic))
