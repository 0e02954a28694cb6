"""Odd parts of models: each maps (rows, WIDTH) to (rows, WIDTH), and does one odd thing on the way.

A part must train in plain torch. Whether its parameters are legal for the engine does not matter:
the engine may refuse it, if the error names a parameter or module. This file has what parts share.
The parts are in `structure`, `values` and `gradients`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 6

PARTS: dict[str, Callable[[], nn.Module]] = {}
# Those that the engine refuses, whatever is around them.
ILLEGAL: set[str] = set()


def part(kind: type[nn.Module]) -> type[nn.Module]:
    PARTS[kind.__name__] = kind
    return kind


def illegal(kind: type[nn.Module]) -> type[nn.Module]:
    ILLEGAL.add(kind.__name__)
    return part(kind)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)


class Made(nn.Module):
    """Has what its class and its bases say in `has`, by name."""

    has: dict[str, Callable[[], Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        for kind in reversed(type(self).__mro__):
            for name, make in vars(kind).get("has", {}).items():
                setattr(self, name, make())
