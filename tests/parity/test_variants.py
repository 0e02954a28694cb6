"""Checkpointing, frozen and tied parameters, param groups, mixed dtypes: all against plain torch,
without clipping.

They are equal bit for bit on any CPU. For one rank the reference is a plain training loop. For
several ranks it runs their micro-batches in turn, so that shapes and the order of sums are the
same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dist.training import (
    LR,
    Curve,
    assert_equal,
    assert_same_training,
    curve_on,
    ds_config,
    one_group,
    start,
    train_in_slices,
    train_plain,
    train_zero,
    two_groups,
)
from tests.parity.models import VOCABULARY, batches, build, in_slices
from tests.parity.test_fp32 import SMALL

STEPS = 3


class SeveralDtypes(nn.Module):
    """An fp32 model with a bf16 block in the middle and a frozen bf16 projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.blocks = nn.ModuleList(
            [nn.Linear(24, 24), nn.Linear(24, 24).bfloat16(), nn.Linear(24, 24)]
        )
        self.frozen = nn.Linear(24, 23, bias=False).bfloat16().requires_grad_(False)
        self.head = nn.Linear(23, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden.to(block.weight.dtype))).float()
        logits = self.head(self.frozen(hidden.bfloat16()).float())
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.roll(1, dims=1).flatten())


def variant(kind: str) -> nn.Module:
    """Build a model. `kind` names what is special about it."""
    if kind == "several dtypes":
        torch.manual_seed(7)
        return SeveralDtypes()
    model = build("gpt2" if kind == "frozen embedding" else "t5")
    if kind in ("reentrant", "non-reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    elif kind == "frozen encoder":
        model.encoder.block.requires_grad_(False)
    elif kind == "frozen embedding":
        # The head is tied with it. So gradients flow through a frozen weight.
        model.get_input_embeddings().requires_grad_(False)
    elif kind == "frozen biases and norms":
        for param in model.parameters():
            param.requires_grad_(param.dim() > 1)
    elif kind == "untied":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    return model


def data(kind: str) -> list[dict[str, torch.Tensor]]:
    return batches("gpt2" if kind in ("frozen embedding", "several dtypes") else "t5", STEPS)


def plain(rank: int, world_size: int, kind: str) -> Curve:
    return train_plain(variant(kind), data(kind))


def slices(rank: int, world_size: int, kind: str, count: int, grouped: bool = False) -> Curve:
    return train_in_slices(
        variant(kind), data(kind), count, grouping=two_groups if grouped else one_group
    )


def sharded(
    rank: int, world_size: int, kind: str, grouped: bool = False, settings: dict | None = None
) -> Curve:
    config = ds_config(**(SMALL if settings is None else settings))
    engine, _ = start(variant(kind), config, two_groups if grouped else one_group)
    return train_zero(engine, data(kind))


KINDS = [
    "plain",
    "reentrant",
    "non-reentrant",
    "frozen encoder",
    "frozen embedding",
    "frozen biases and norms",
    "untied",
]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_and_three_are_bit_for_bit(kind):
    assert_equal(curve_on(1, sharded, kind), curve_on(1, plain, kind))
    assert_same_training(curve_on(3, sharded, kind), curve_on(1, slices, kind, 3))


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_checkpointing_changes_nothing(kind):
    """Bit for bit as the checkpointed model in plain torch, with three settings.

    They gather for each use, keep all that was gathered, or keep some. (In plain torch too,
    checkpointing changes the order in which gradients of the encoder's output are added.)"""
    anew = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    expected = curve_on(1, slices, kind, 2, True)
    for settings in (SMALL, anew, {}):
        found = curve_on(
            2, sharded, kind, True, settings | {"stage3_param_persistence_threshold": 0}
        )
        assert_same_training(found, expected)


def layer_wise(named: list[tuple[str, nn.Parameter]]) -> list[dict]:
    """Groups as scripts of Hugging Face make them, from the last layer to the first: the learning
    rate shrinks by a fifth for each layer, and biases and norms have no weight decay."""
    layers = [["ln_f"], ["h.1."], ["h.0."], ["wte", "wpe"]]
    found = []
    for depth, words in enumerate(layers):
        own = [(name, param) for name, param in named if any(word in name for word in words)]
        for decays in (True, False):
            params = [
                p for name, p in own if (not name.endswith("bias") and "ln_" not in name) is decays
            ]
            if params:
                found.append(
                    {
                        "params": params,
                        "lr": LR * 0.8**depth,
                        "weight_decay": 0.1 if decays else 0.0,
                    }
                )
    assert len(found) == 6 and sum(len(group["params"]) for group in found) == len(named)
    return found


def grown(groups: list[dict]) -> torch.optim.Optimizer:
    """Make the optimizer for the first group, and add the others."""
    optimizer = torch.optim.AdamW(groups[:1], fused=True)
    for group in groups[1:]:
        optimizer.add_param_group(group)
    return optimizer


def in_layers(rank: int, world_size: int, stage: int) -> Curve:
    engine, _ = start(build("gpt2"), ds_config(stage=stage, **SMALL), layer_wise, grown)
    return train_zero(engine, batches("gpt2", STEPS))


@pytest.mark.parametrize(("stage", "ranks"), [(1, 3), (3, 2)])
def test_layer_wise_groups_are_bit_for_bit(stage, ranks):
    options = {"grouping": layer_wise, "make": grown}
    expected = curve_on(1, in_slices, "gpt2", STEPS, ranks, 1, options)
    assert_same_training(curve_on(ranks, in_layers, stage), expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_several_dtypes_keep_theirs_with_fp32_masters(world_size):
    found = curve_on(world_size, sharded, "several dtypes", True)
    assert_same_training(found, curve_on(1, slices, "several dtypes", world_size, True))
    assert found.weights["blocks.1.weight"].dtype == torch.bfloat16
