"""Small random models with their batches. They are the same on every rank, whatever ran before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import zero
from tests.dist import training
from tests.dist.training import (
    Batch,
    Curve,
    adamw,
    assert_same_training,
    curve_on,
    one_group,
    train_in_slices,
    train_plain,
    train_zero,
    trainable,
)

VOCABULARY = 97
# Divisible by 1, 2, 3 and 4 ranks.
ROWS = 12


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, initializer_range=0.06,
        loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Build a Llama with odd sizes: few parameters have a size that is divisible by 2, 3 or 4."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}
    return small("llama", hidden_size=30, intermediate_size=37, num_hidden_layers=3, **heads)


def small(kind: str, **options: Any) -> Any:
    """A causal language model of transformers, by the type in its configuration."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 16, "initializer_range": 0.06, "loss_type": "ForCausalLM",
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | options)).train()


def mixtral() -> nn.Module:
    return small("mixtral", num_local_experts=4, num_experts_per_tok=2, initializer_range=0.02)


def deepseek() -> nn.Module:
    """Build a DeepSeek-V3, whose routers are kept in fp32, with rules for choosing that 16 bits
    would change."""
    heads = {"num_attention_heads": 2, "head_dim": 4, "v_head_dim": 8}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
    return small("deepseek_v3", **heads, **ranks, **experts, initializer_range=0.3)


MODELS = {"t5": t5, "gpt2": gpt2, "llama": llama, "mixtral": mixtral, "deepseek": deepseek}


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]().train()


def batches(name: str, steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(steps):
        ids = torch.randint(3, VOCABULARY, (ROWS, 9), generator=generator)
        labels = (
            torch.randint(3, VOCABULARY, (ROWS, 7), generator=generator) if name == "t5" else ids
        )
        made.append({"input_ids": ids, "labels": labels})
    return made


# -- the same bits as plain torch

Builder = str | Callable[[], nn.Module]
Options = dict[str, Any]


def sharded(
    rank: int, world_size: int, model: Builder, data: list[Batch], config: Options, how: Options
) -> Curve:
    """Train on the engine. `model`: a name, or what builds it. `how`: `grouping` and `make`, as for
    `start`; `look` is called with the engine before."""
    made = build(model) if isinstance(model, str) else model()
    how = {"grouping": one_group, "make": adamw, "look": None} | how
    optimizer = None if "optimizer" in config else how["make"](how["grouping"](trainable(made)))
    engine, *_ = zero.initialize(model=made, optimizer=optimizer, config=config)
    if how["look"] is not None:
        how["look"](engine)
    curve = train_zero(engine, data)
    curve.weights = {name: value.cpu() for name, value in curve.weights.items()}
    engine.destroy()
    return curve


def in_slices(
    rank: int, world_size: int, model: Builder, data: list[Batch], ranks: int, options: Options
) -> Curve:
    made = build(model) if isinstance(model, str) else model()
    return train_in_slices(made, data, ranks, **options)


def assert_bits(
    ranks: int, model: Builder, data: list[Batch], config: Options, look: Any = None, **options: Any
) -> Curve:
    """Assert that `ranks` ranks have the losses and weights of plain torch bit for bit.

    The reference runs their micro-batches in turn, so that shapes and the order of sums are the
    same. The squares of a norm are summed in parts by ranks and param groups. There norms are equal
    within rounding, and with clipping the reference divides by the engine's. `options` are those of
    `train_in_slices`."""
    how = {key: options[key] for key in ("grouping", "make") if key in options} | {"look": look}
    found = curve_on(ranks, sharded, model, data, config, how)
    clip, section = config["gradient_clipping"], config["zero_optimization"]
    assert max(found.norms) > clip, "clipping must be at work"
    accumulation = config["gradient_accumulation_steps"]
    options |= {"accumulation": accumulation, "clip": clip}
    options |= {"own_first": section["stage"] < 2 and accumulation > 1}
    options |= {"shard_size": section.get("mics_shard_size", 1)}
    in_parts = ranks > 1 or "grouping" in options
    options |= {"norms": found.norms if in_parts else None}
    expected = curve_on(1, in_slices, model, data, ranks, options)
    assert in_parts or found.norms == expected.norms
    assert_same_training(found, expected)
    return found


# -- mixtures whose experts are divided over ranks

CLIP, WIDTH, INNER = 0.2, 24, 16
MIXTURE = {"hidden_size": WIDTH, "num_experts_per_tok": 2}
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def mixture(name: str, experts: int) -> nn.Module:
    """A small model. In "one-sided" all tokens choose the same two experts, so that some ranks get
    no tokens, and most experts have none.
    """
    torch.manual_seed(7)
    if name == "qwen3":  # the second layer has no experts
        sizes = {"moe_intermediate_size": INNER, "num_experts": experts, "mlp_only_layers": [1]}
        return small("qwen3_moe", **MIXTURE | sizes | {"intermediate_size": 32})
    model = small("mixtral", **MIXTURE, intermediate_size=INNER, num_local_experts=experts)
    if name == "one-sided":
        for layer in model.model.layers:
            nn.init.zeros_(layer.mlp.gate.weight).requires_grad_(False)
    return model


def start(model: nn.Module, config: dict[str, Any]) -> zero.ZeroEngine:
    return training.start(model, config)[0]


def in_float64(model: nn.Module, batches: list[Batch]) -> Curve:
    """Train in plain torch. In fp32, norms of these models alone are rounded by up to 1.1e-6."""
    model.double().set_experts_implementation("eager")
    return train_plain(model, batches, CLIP)
