"""Models and synthetic batches for the benchmarks. Nothing here concerns sharding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import T5Config, T5ForConditionalGeneration

# d_model and d_kv of t5-small. d_ff and vocabulary are chosen for 42.0M parameters in 6 + 6 blocks.
T5_42M = {
    "d_model": 512,
    "d_ff": 1536,
    "num_layers": 6,
    "num_heads": 8,
    "d_kv": 64,
    "vocab_size": 8192,
}
# t5-small: 60.5M parameters.
T5_SMALL = {
    "d_model": 512,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "d_kv": 64,
    "vocab_size": 32128,
}
# t5-base (223M parameters in 12 + 12 blocks, tied embeddings) with one more block each: 250M
# parameters.
T5_250M = {
    "d_model": 768,
    "d_ff": 3072,
    "num_layers": 14,
    "num_heads": 12,
    "d_kv": 64,
    "vocab_size": 32128,
}
# t5-large with a wider feed-forward layer: 1.00e9 parameters in 24 + 24 blocks. The largest block
# has 21.0M.
T5_1B = {
    "d_model": 1024,
    "d_ff": 6784,
    "num_layers": 24,
    "num_heads": 16,
    "d_kv": 64,
    "vocab_size": 32128,
}


def t5_config(sizes: dict[str, int]) -> T5Config:
    """Return a T5 configuration without dropout, so that two engines with the same seed have the
    same losses.
    """
    return T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)


def build_t5(sizes: dict[str, int], seed: int) -> T5ForConditionalGeneration:
    """Build a random T5. A seed gives the same values on every rank and in every environment."""
    torch.manual_seed(seed)
    return T5ForConditionalGeneration(t5_config(sizes))


def synthetic_batches(
    vocab_size: int, batch: int, source_length: int, target_length: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random token ids without end:

    `input_ids` (batch, source_length), `labels` (batch, target_length).
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield {
            "input_ids": torch.randint(2, vocab_size, (batch, source_length), generator=generator),
            "labels": torch.randint(2, vocab_size, (batch, target_length), generator=generator),
        }
