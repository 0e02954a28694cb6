"""Layers computed a tile of the tokens at a time: the numbers of whole ones, and no tensor larger
than a tile's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.dist.parallel.test_sequence import llama
from tests.dist.training import ds_config, relative, start
from tests.processes import run_on
from zero.errors import UsageError
from zero.integrations.deepspeed.finder import FacadeModule
from zero.parallel.sequence import tile_mlps, tiled, tiled_loss

ULYSSES = FacadeModule("deepspeed.runtime.sequence_parallel.ulysses_sp")
TOKENS, VOCABULARY, TILES = 30, 97, 4


def train(rank: int, world_size: int, tiles: int, stage: int) -> tuple[list[float], list[float]]:
    model = llama(intermediate_size=50)
    if tiles:
        assert tile_mlps(model, tiles) == 2
    engine, _ = start(model, ds_config(stage=stage, stage3_param_persistence_threshold=20))
    losses, norms = [], []
    for step in range(4):
        # Ranks have sequences of different lengths.
        ids = torch.randint(
            VOCABULARY, (2, 9 + rank + step), generator=torch.Generator().manual_seed(step)
        )
        labels = ids.roll(-1, dims=1).masked_fill(ids < 30, -100)
        if tiles:
            asked = {"logits_to_keep": 1, "output_hidden_states": True}
            hidden = engine(input_ids=ids, **asked).hidden_states[-1]
            loss = tiled_loss(hidden, engine.lm_head, labels, tiles)
        else:
            loss = engine(input_ids=ids, labels=labels, shift_labels=labels).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


@pytest.mark.parametrize("stage", [1, 3])
def test_tiles_train_as_whole_layers_do(stage):
    for whole, in_tiles in zip(run_on(2, train, 0, stage), run_on(2, train, 3, stage), strict=True):
        assert relative(in_tiles[0], whole[0]) < 1e-6
        assert relative(in_tiles[1], whole[1]) < 1e-6


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *found])
        return result


def parts() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    hidden = torch.randn(2, TOKENS // 2, 4, requires_grad=True)
    return nn.Linear(4, VOCABULARY), hidden, torch.randint(VOCABULARY, (2, TOKENS // 2))


def gradients(loss: torch.Tensor, head: nn.Linear, hidden: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, head.weight, head.bias])]


def test_a_tiled_loss_makes_no_logits_of_all_tokens():
    head, hidden, labels = parts()
    with Largest() as seen:
        found = gradients(tiled_loss(hidden, head, labels, TILES), head, hidden)
    assert seen.elements == -(-TOKENS // TILES) * VOCABULARY
    expected = gradients(cross_entropy(head(hidden).flatten(0, 1), labels.flatten()), head, hidden)
    torch.testing.assert_close(found, expected)


def test_more_tiles_than_tokens_and_no_label():
    head, hidden, labels = parts()
    expected = gradients(tiled_loss(hidden, head, labels, 1), head, hidden)
    torch.testing.assert_close(
        gradients(tiled_loss(hidden, head, labels, TOKENS + 5), head, hidden), expected
    )
    none = gradients(tiled_loss(hidden, head, torch.full_like(labels, -100), TILES), head, hidden)
    assert all(not each.any() for each in none)


def test_deepspeeds_tiled_mlp():
    head, hidden, _ = parts()
    tiled_mlp = ULYSSES.TiledMLP.apply(lambda self, x: self(x), head, hidden, TILES, [head.weight])
    found = gradients(tiled_mlp.square().sum(), head, hidden)
    torch.testing.assert_close(found, gradients(head(hidden).square().sum(), head, hidden))


def test_mistakes_are_named():
    head, hidden, _ = parts()
    with pytest.raises(UsageError, match="Linear has no module that is named 'mlp'"):
        tile_mlps(head, 2)
    with pytest.raises(UsageError, match="tiles: must be at least 1, got 0"):
        tiled(head, hidden, tiles=0)
