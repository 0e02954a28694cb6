"""One rank of `python -m benchmarks.estimate`, on the simulated accelerator."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import torch
import transformers

import zero
from tests.accelerator import device
from zero.estimate import DEVICE, HOST

STEPS = 3
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": (
        "T5",
        {"d_model": 384, "d_kv": 64, "d_ff": 1536, "num_layers": 4, "num_heads": 6, "vocab_size": 4096,
         "dropout_rate": 0.0, "decoder_start_token_id": 0, "architectures": ["T5ForConditionalGeneration"]},
    ),
    "llama": (
        "Llama",
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
         "vocab_size": 4096, "architectures": ["LlamaForCausalLM"]},
    ),
    "gpt2": (
        "GPT2",
        {"n_embd": 384, "n_layer": 8, "n_head": 6, "vocab_size": 4096, "n_positions": 512,
         "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "architectures": ["GPT2LMHeadModel"]},
    ),
}  # fmt: skip


def shape_of(name: str) -> transformers.PretrainedConfig:
    """The model's configuration, without fused attention: each device has another kernel for that."""
    kind, sizes = SIZES[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config._attn_implementation = "eager"
    return config


def measure(
    rank: int, world_size: int, name: str, settings: dict[str, Any], batch: int, length: int, checkpointing: bool
) -> dict[str, int]:
    """Train; peak of device memory in bytes after `initialize`, and the growth of host memory."""
    config = shape_of(name)
    model = getattr(transformers, config.architectures[0])(config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    before = psutil.Process().memory_info().rss - sum(param.nbytes for param in model.parameters())
    engine = zero.initialize(model=model, config=settings)[0]
    torch.accelerator.reset_peak_memory_stats()
    ids = torch.randint(3, 4096, (batch, length)).to(device.NAME)
    for _ in range(STEPS):
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
    engine.optimizer.wait()
    torch.accelerator.synchronize()
    gc.collect()
    from zero.monitor.held import held

    rss = psutil.Process().memory_info().rss - before - torch.accelerator.memory_allocated()
    return {DEVICE: torch.accelerator.max_memory_allocated(), HOST: rss, "held": held(engine)}
