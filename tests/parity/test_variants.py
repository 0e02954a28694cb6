"""Checkpointing, frozen and tied parameters, param groups, mixed dtypes: all against plain torch,
without clipping.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.dist.training import LR, ds_config, two_groups
from tests.parity.models import VOCABULARY, assert_bits, batches, build
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
    model = build("gpt2" if kind in ("frozen embedding", "layers") else "t5")
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
    return batches(
        "gpt2" if kind in ("frozen embedding", "several dtypes", "layers") else "t5", STEPS
    )


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


# (what is special, ranks, keys, how)
KINDS = [
    "reentrant",
    "non-reentrant",
    "frozen encoder",
    "frozen embedding",
    "frozen biases and norms",
    "untied",
]
CASES = [(kind, ranks, SMALL, {}) for kind in KINDS for ranks in (1, 3)]
# Two groups of which nothing persists: gathered for each use, all kept, or some of it.
TWO = {"grouping": two_groups}
ANEW = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
CASES += [
    (kind, 2, keys | {"stage3_param_persistence_threshold": 0}, TWO)
    for kind in KINDS[:2]
    for keys in (SMALL, ANEW, {})
]
CASES += [("several dtypes", ranks, SMALL, TWO) for ranks in (1, 3)]
LAYERS = {"grouping": layer_wise, "make": grown}
CASES += [("layers", 3, SMALL | {"stage": 1}, LAYERS), ("layers", 2, SMALL, LAYERS)]


@pytest.mark.parametrize(("kind", "ranks", "keys", "how"), CASES)
def test_variants_are_bit_for_bit(kind, ranks, keys, how):
    """In plain torch too, checkpoints change the order in which gradients of the encoder's output
    are added."""
    assert_bits(ranks, partial(variant, kind), data(kind), ds_config(**keys), **how)
