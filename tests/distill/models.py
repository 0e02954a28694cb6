"""Tiny models and data for the tests of distillation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import (
    BloomForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from distill.data import Collator

VOCABULARY = 40


def causal(kind: Any, width: int, layers: int, seed: int, **others: Any) -> PreTrainedModel:
    """A model of this class. Not by AutoModelForCausalLM: at stage 3 its `from_config` shards."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "initializer_range": 0.3}
    return kind(kind.config_class(**sizes | others))


def llama(
    width: int, layers: int, seed: int, vocabulary: int = VOCABULARY, tied: bool = True
) -> PreTrainedModel:
    return causal(
        LlamaForCausalLM, width, layers, seed, vocab_size=vocabulary, intermediate_size=2 * width,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def gpt2(width: int, layers: int, seed: int) -> PreTrainedModel:
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return causal(
        GPT2LMHeadModel, width, layers, seed, bos_token_id=1, eos_token_id=2, **no_dropout
    )


bloom = partial(causal, BloomForCausalLM)


def t5(width: int, layers: int, seed: int, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    torch.manual_seed(seed)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=vocabulary, d_model=width, d_kv=width // 4, d_ff=2 * width,
            num_layers=layers, num_heads=4,
            dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
            initializer_factor=1.0,
        )
    )  # fmt: skip


def sequences(
    count: int, shortest: int = 4, longest: int = 12, seed: int = 0
) -> list[dict[str, list[int]]]:
    """Return examples for a causal model: random token ids of different lengths.

    The labels are the same ids.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    ids = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]
    return [{"input_ids": row, "labels": row} for row in ids]


def pairs(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Return examples for an encoder-decoder model."""
    sources, targets = sequences(count, seed=seed), sequences(count, seed=seed + 1)
    return [
        {"input_ids": s["input_ids"], "labels": t["labels"]}
        for s, t in zip(sources, targets, strict=True)
    ]


class Pad(Collator):
    """Pads further, to a multiple."""

    def __init__(self, multiple: int = 1):
        super().__init__(0)
        self.multiple = multiple

    def __call__(self, examples: Iterable[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        return {
            name: pad(value, (0, -value.shape[1] % self.multiple), value=self.padding[name])
            for name, value in super().__call__(examples).items()
        }
