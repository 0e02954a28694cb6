"""Models and synthetic batches for the benchmarks. Nothing here concerns sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, PretrainedConfig, T5Config

BLOCKS = ("LlamaDecoderLayer", "T5Block")


def t5(
    width: int, d_ff: int, layers: int, heads: int, d_kv: int = 64, vocabulary: int = 32128
) -> T5Config:
    """Return a T5 without dropout, so that two engines with the same seed have the same losses."""
    return T5Config(
        d_model=width, d_ff=d_ff, num_layers=layers, num_heads=heads, d_kv=d_kv,
        vocab_size=vocabulary, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
        architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip


def llama(
    hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int, **others: Any
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, vocab_size=vocabulary, max_position_embeddings=8192,
        use_cache=False, architectures=["LlamaForCausalLM"], **others,
    )  # fmt: skip


MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "t5-10m": lambda: t5(256, 1024, 4, 4, vocabulary=8192),
    # d_model and d_kv of t5-small; the rest is chosen for 42.0M parameters in 6 + 6 blocks.
    "t5-42m": lambda: t5(512, 1536, 6, 8, vocabulary=8192),
    "t5-small": lambda: t5(512, 2048, 6, 8),  # 60.5M parameters
    # t5-base (223M parameters in 12 + 12 blocks) with two more blocks each.
    "t5-250m": lambda: t5(768, 3072, 14, 12),
    # t5-large with a wider feed-forward layer: 1.00e9 parameters. The largest block has 21.0M.
    "t5-1b": lambda: t5(1024, 6784, 24, 16),
    "t5-3b": lambda: t5(1024, 16384, 24, 32, d_kv=128),  # 2.85 billion parameters
    "t5-11b": lambda: t5(1024, 65536, 24, 128, d_kv=128),
    "llama-tiny": lambda: llama(256, 512, 4, 32, 128256, num_key_value_heads=8),
    "llama-50m": lambda: llama(640, 1728, 8, 10, 16000, tie_word_embeddings=True),
    # Shapes of Llama-3.2-1B (1.24 billion parameters), Llama-3.1-8B and 70B.
    "llama-1b": lambda: llama(
        2048, 8192, 16, 32, 128256, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True
    ),
    # Half of the next one's blocks, and 32,000 words: 3.75 billion parameters.
    "llama-4b": lambda: llama(4096, 14336, 16, 32, 32000, num_key_value_heads=8),
    # The blocks of the 8B with fewer words: 7.24 billion parameters.
    "llama-8b-32k": lambda: llama(4096, 14336, 32, 32, 32000, num_key_value_heads=8),
    "llama-8b": lambda: llama(4096, 14336, 32, 32, 128256, num_key_value_heads=8),
    "llama-70b": lambda: llama(8192, 28672, 80, 64, 128256, num_key_value_heads=8),
}


def build(config: PretrainedConfig | str, seed: int = 1) -> nn.Module:
    """Build a random model. A seed gives the same values on every rank and in every
    environment.
    """
    config = MODELS[config]() if isinstance(config, str) else config
    torch.manual_seed(seed)
    return getattr(transformers, config.architectures[0])(config).train()


def synthetic_batches(
    vocabulary: int, batch: int, source_length: int, target_length: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random token ids without end:

    `input_ids` (batch, source_length), `labels` (batch, target_length).
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield {
            "input_ids": torch.randint(2, vocabulary, (batch, source_length), generator=generator),
            "labels": torch.randint(2, vocabulary, (batch, target_length), generator=generator),
        }
