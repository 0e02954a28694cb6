"""Numbers that an optimizer keeps outside of its state: counts of steps, learning rates, flags.

They stand in the param groups and in attributes. An optimizer that gets its tensors in several calls must see the same
numbers in each of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

# What torch and its schedulers keep on an optimizer.
_TORCHS_OWN = {"_step_count", "_opt_called"}


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """All numbers, by the name of their place."""
    return {name + key: float(place[key]) for name, place in _places(optimizer).items() for key in _numbers_in(place)}


def set_numbers(optimizer: torch.optim.Optimizer, values: Mapping[str, float]) -> None:
    """Give the numbers these values, and delete those that have none."""
    for name, place in _places(optimizer).items():
        for key in _numbers_in(place):
            value, now = values.get(name + key), place[key]
            if value is None:
                del place[key]
            elif isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                place[key] = type(now)(value)


def _places(optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    groups = {f"param group {number}, ": group for number, group in enumerate(optimizer.param_groups)}
    return groups | {"attribute ": vars(optimizer)}


def _numbers_in(place: Mapping[str, object]) -> list[str]:
    def is_number(value: object) -> bool:
        return type(value) in (bool, int, float) or (isinstance(value, torch.Tensor) and value.numel() == 1)

    return [key for key, value in place.items() if is_number(value) and key not in _TORCHS_OWN]
