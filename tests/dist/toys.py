"""A toy model, and functions that record what the engine does with it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero.core.param_group import ParamGroup, State
from zero.engine import ZeroEngine

WIDTH = 13
BLOCK = 2 * WIDTH + (WIDTH + 1) * 3 * WIDTH + (3 * WIDTH + 1) * WIDTH
ROWS = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Toy(nn.Module):
    """A stem, blocks and a head. Each of them is one group, if nothing is persistent.

    `dropped`: the numbers of blocks that a forward leaves out. `checkpointing`: None, "reentrant"
    or "non-reentrant". `tied`: the head has the weight of the stem."""

    def __init__(
        self, blocks: int = 4, checkpointing: str | None = None, tied: bool = False
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.head.weight = self.stem.weight
        self.checkpointing = checkpointing
        self.dropped: set[int] = set()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.stem(x.to(self.stem.weight.dtype))
        for number, block in enumerate(self.blocks):
            if number in self.dropped:
                continue
            if self.checkpointing is not None and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, use_reentrant=self.checkpointing == "reentrant")
            else:
                hidden = block(hidden)
        hidden = self.head(hidden)
        return hidden if y is None else nn.functional.mse_loss(hidden.float(), y.float())


def toy(**options: Any) -> Toy:
    torch.manual_seed(3)
    return Toy(**options)


def toy_batches(steps: int, dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {name: torch.randn(ROWS, WIDTH, generator=generator).to(dtype) for name in ("x", "y")}
        for _ in range(steps)
    ]


@contextlib.contextmanager
def recorded(cls: type, *names: str) -> Iterator[list[tuple[str, Any]]]:
    """Record calls of methods of `cls`, in order, as (name, self)."""
    events: list[tuple[str, Any]] = []
    with contextlib.ExitStack() as stack:
        for name in names:
            original = getattr(cls, name)

            def record(self, *args, _name=name, _original=original, **kwargs):
                events.append((_name, self))
                return _original(self, *args, **kwargs)

            stack.enter_context(mock.patch.object(cls, name, record))
        yield events


@contextlib.contextmanager
def after_each(cls: type, name: str, look: Any) -> Iterator[None]:
    """Call `look(self)` after each call of the method `name` of `cls`."""
    original = getattr(cls, name)

    def wrapped(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        look(self)
        return result

    with mock.patch.object(cls, name, wrapped):
        yield


def messages() -> list[str]:
    """What the logger `zero` is told from now on."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("zero").addHandler(handler)
    return texts


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """The bytes of the distinct storages: a shard may be a part of a full buffer."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def gathered(engine: ZeroEngine) -> int:
    """Return how many elements the storages of all full buffers hold now, with padding."""
    return sum(
        group.full.untyped_storage().nbytes() // group.full.element_size()
        for group in engine.groups
        if not group.persistent
    )


def gathering(engine: ZeroEngine) -> int:
    """Return how many elements are being gathered now."""
    return sum(group.layout.numel for group in engine.groups if group.state is State.GATHERING)


def short(events: list[tuple[str, ParamGroup]]) -> list[tuple[str, str]]:
    return [(name, group.name) for name, group in events]
