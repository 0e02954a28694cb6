"""One rank of `python -m benchmarks.estimate`, on the simulated accelerator."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers

import zero
from tests.accelerator import device
from zero.config import load_config
from zero.monitor.memory_usage import DEVICE, DISK, HOST, bytes_by_kind
from zero.offload import tiers
from zero.tools.estimate.adapters import add_adapter, quantization_of, quantize
from zero.tools.estimate.model import class_of, enable_checkpointing

STEPS = 3
# Ends of a model's name: an adapter of this rank is trained, and its base is quantized.
LORA, QLORA, RANK = "-lora", "-qlora", "8"
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": (
        "T5",
        {"d_model": 384, "d_kv": 64, "d_ff": 1536, "num_layers": 4, "num_heads": 6,
        "vocab_size": 4096,
         "dropout_rate": 0.0, "decoder_start_token_id": 0,
         "architectures": ["T5ForConditionalGeneration"]},
    ),
    "llama": (
        "Llama",
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 6,
         "vocab_size": 4096, "architectures": ["LlamaForCausalLM"]},
    ),
    "mixtral": (
        "Mixtral",
        {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
        "num_attention_heads": 4,
         "num_key_value_heads": 4, "num_local_experts": 6, "num_experts_per_tok": 2,
         "vocab_size": 2048,
         "architectures": ["MixtralForCausalLM"]},
    ),
    "tiny": (
        "Llama",
        {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
        "num_attention_heads": 2,
         "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2,
         "architectures": ["LlamaForCausalLM"]},
    ),
    "gpt2": (
        "GPT2",
        {"n_embd": 384, "n_layer": 8, "n_head": 6, "vocab_size": 4096, "n_positions": 512,
         "bos_token_id": 1, "eos_token_id": 2,
         "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
         "architectures": ["GPT2LMHeadModel"]},
    ),
}  # fmt: skip


def shape_of(name: str) -> transformers.PretrainedConfig:
    """The model's configuration, without fused attention: each device has another kernel for
    that.
    """
    kind, sizes = SIZES[name.removesuffix(LORA).removesuffix(QLORA)]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    if name.endswith(QLORA):
        config.quantization_config = FOUR_BITS
    config._attn_implementation = "eager"
    return config


def measure(
    rank: int,
    world_size: int,
    name: str,
    settings: dict[str, Any],
    batch: int,
    length: int,
    checkpointing: bool,
) -> dict[str, int]:
    """Train. Return the peak of device memory in bytes since `initialize`, and what the engine
    holds elsewhere.

    All buffers are free at the end, so the lists of free ones show how many there were.
    """
    if size := settings["zero_optimization"].get("zero_hpz_partition_size"):
        os.environ["LOCAL_WORLD_SIZE"] = str(size)  # second shards are within a machine
    config = shape_of(name)
    model = class_of(config)(config).to(load_config(settings).compute_dtype)
    if quantization := quantization_of(config):
        quantize(model, quantization)
    if name.endswith((LORA, QLORA)):
        add_adapter(model, RANK)
    if checkpointing:
        enable_checkpointing(model)
    engine = zero.initialize(model=model, config=settings)[0]
    ids = torch.randint(3, config.vocab_size, (batch, length)).to(device.NAME)
    return measure_steps(
        lambda: engine(input_ids=ids, labels=ids, use_cache=False).loss, settings, engine
    )


def measure_steps(
    loss: Callable[[], torch.Tensor], settings: dict[str, Any], engine: Any, *others: Any
) -> dict[str, int]:
    """Train `engine`, and return what it and the `others` hold, as `measure` does."""
    torch.accelerator.reset_peak_memory_stats()
    micro_batches = STEPS * settings.get("gradient_accumulation_steps", 1)
    for _ in range(micro_batches):
        engine.backward(loss())
        engine.step()
    optimizer = engine.optimizer
    assert optimizer is not None  # these cases train
    optimizer.wait()
    torch.accelerator.synchronize()
    updates = optimizer._updates
    pools = [updates._for_weights, updates._buffers, tiers._staging._memory]
    pools += [file._bounces for file in tiers._files.values()]
    tiers._staging._copies.clear()
    buffers = sum(len(block) for pool in pools for block in pool._free)
    kept: Counter[str] = Counter()
    for each in (engine, *others):
        kept += {place: sum(parts.values()) for place, parts in bytes_by_kind(each).items()}
    if engine.activations is not None:  # all of a forward's are there when it ends
        buffers += engine.activations.moved_bytes // micro_batches
    peak = torch.accelerator.max_memory_allocated()
    return {DEVICE: peak, HOST: kept[HOST] + buffers, DISK: kept[DISK]}
