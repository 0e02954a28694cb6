"""Runs layers that work on one token at a time on a part of the tokens after another.

[Note: what is held] A long sequence's largest tensors are those inside of an MLP, (tokens,
intermediate size), and the logits, (tokens, vocabulary). In forward nothing of a tile is kept but
its input and output. In backward the tile is computed again, and its gradients follow at once. So
these tensors exist for one tile at a time, for one more forward of the layer. Each parameter still
gets one gradient, the sum over the tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from zero.errors import UsageError
from zero.parallel.sequence.group import IGNORED


def tiled(
    function: Callable[..., torch.Tensor], *tensors: torch.Tensor, tiles: int, dim: int = 1
) -> torch.Tensor:
    """`function(*tensors)`, computed for `tiles` parts of the tensors along `dim`; the results are
    joined there.

    Ranks that share parameters must use the same number of tiles. Parts differ by one in length,
    and may be empty."""
    return torch.cat(_run_tiles(function, tensors, tiles, dim), dim=dim)


def _run_tiles(
    function: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], tiles: int, dim: int
) -> list[torch.Tensor]:
    if tiles < 1:
        raise UsageError(f"tiles: must be at least 1, got {tiles}")
    parts = zip(*(tensor.tensor_split(tiles, dim=dim) for tensor in tensors), strict=True)
    return [checkpoint(function, *part, use_reentrant=False) for part in parts]


def tile_mlps(model: nn.Module, tiles: int) -> int:
    """Have each module of `model` that is named `mlp` work on `tiles` parts of its tokens. Returns
    how many there are.

    They must take and return one (batch, tokens, channels) tensor. Mixtures of experts are left as
    they are. Call it before the engine is made. Raises UsageError if there is none."""
    found = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "mlp" and not hasattr(module, "experts")
    ]
    if not found:
        raise UsageError(f"tile_mlps: {type(model).__name__} has no module that is named 'mlp'")
    for module in found:
        module.forward = partial(tiled, module.forward, tiles=tiles)
    return len(found)


def tiled_loss(
    hidden: torch.Tensor,
    head: nn.Linear,
    shift_labels: torch.Tensor,
    tiles: int,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """Mean cross-entropy of `head(hidden)` in fp32, without logits of all tokens. 0 if no token
    counts.

    Args:
        hidden: (batch, tokens, channels).
        shift_labels: (batch, tokens), each the label of what is predicted there.
    """

    def part(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # The weight is read here, not by the layer: the engine gathers it once, and keeps it until
        # backward has ended.
        logits = linear(hidden, head.weight, head.bias).float()
        return cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")

    tokens = hidden.reshape(-1, hidden.shape[-1]), shift_labels.reshape(-1)
    total = torch.stack(_run_tiles(part, tokens, tiles, 0)).sum()
    return total / (shift_labels != ignore_index).sum().clamp(min=1)
