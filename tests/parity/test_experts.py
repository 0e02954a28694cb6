"""Mixtures of experts as transformers packs them: groups of their own below the block, with plain
torch's numbers.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.dist.training import (
    Curve,
    assert_same_training,
    curve_on,
    ds_config,
    start,
    train_in_slices,
    train_zero,
)
from tests.parity.models import VOCABULARY, batches
from zero.core.param_group import State

STEPS = 3
EXPERTS, WIDTH, INNER, LAYERS = 8, 24, 12, 2
EXPERTS_NUMEL = EXPERTS * 3 * WIDTH * INNER
WHOLE = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 12, "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
    "output_router_logits": True, "initializer_range": 0.06, "loss_type": "ForCausalLM",
}  # fmt: skip


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(intermediate_size=INNER, num_local_experts=EXPERTS, **COMMON)
    )


def qwen3() -> nn.Module:
    """Its second layer has no experts."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            intermediate_size=32,
            moe_intermediate_size=INNER,
            num_experts=EXPERTS,
            mlp_only_layers=[1],
            **COMMON,
        )
    )


MODELS = {"mixtral": mixtral, "qwen3": qwen3}


def build(name: str, implementation: str) -> nn.Module:
    torch.manual_seed(7)
    model = MODELS[name]().train()
    model.set_experts_implementation(implementation)
    return model


def data() -> list[dict[str, torch.Tensor]]:
    return batches("llama", STEPS)


@cache
def expected(name: str, implementation: str, accumulation: int = 1) -> Curve:
    return curve_on(1, plain, name, implementation, accumulation)


def plain(rank: int, world_size: int, name: str, implementation: str, accumulation: int) -> Curve:
    return train_in_slices(build(name, implementation), data(), 2, accumulation)


def sharded(rank: int, world_size: int, name: str, implementation: str, settings: dict) -> Curve:
    model = build(name, implementation)
    engine, _ = start(model, ds_config(**WHOLE, **settings))
    experts = [
        group for group in engine.groups if any("experts" in each for each in group.param_names)
    ]
    assert len(experts) == {"mixtral": 2, "qwen3": 1}[name] and not any(
        group.persistent for group in experts
    )
    assert all(group.layout.numel == EXPERTS_NUMEL for group in experts)
    blocks = [group for group in engine.groups if "layers." in group.name and group not in experts]
    assert len(blocks) == LAYERS
    while_attention: list[int] = []

    def look(*_: object) -> None:
        while_attention.append(sum(group.state is not State.SHARDED for group in experts))

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(look)
    curve = train_zero(engine, data())
    assert while_attention and not any(while_attention), (
        "experts are gathered apart from the attention"
    )
    return curve


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_experts_are_groups_of_their_own_and_the_numbers_are_plain_torchs(name, implementation):
    settings = {"stage3_prefetch_bucket_size": 0}
    found = curve_on(2, sharded, name, implementation, settings)
    assert_same_training(found, expected(name, implementation))
