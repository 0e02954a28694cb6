"""Facts that must be equal on all ranks, for `zero.comm.control.Control.require_same`: settings,
versions, and the numbers of an optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from zero.releases import installed


def hyper_parameters(param_groups: Sequence[Mapping]) -> dict[str, float]:
    """The numbers in an optimizer's param groups, by name; parameters by their count, flags as 0
    and 1.
    """
    numbers: dict[str, float] = {}
    for index, group in enumerate(param_groups):
        for key, value in group.items():
            name = f"param group {index}, {key}"
            if key == "params":
                value = len(value)
            values = value if isinstance(value, (tuple, list)) else [value]
            for place, number in enumerate(values):
                is_scalar = isinstance(number, torch.Tensor) and number.numel() == 1
                if is_scalar or isinstance(number, (int, float)):
                    numbers[f"{name}[{place}]" if len(values) > 1 else name] = float(number)
    return numbers


def flat(nested: Mapping, prefix: str = "") -> dict[str, object]:
    """A nest of dicts as one dict with dotted keys."""
    result: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


@functools.cache
def versions() -> dict[str, str]:
    """The versions of the installed libraries that affect results.

    Which of them are imported may differ by rank.
    """
    packages = ("zero-engine", "transformers", "accelerate", "peft")
    found = {f"version of {name}": installed(name) or "not installed" for name in packages}
    return {"version of torch": str(torch.__version__)} | found
