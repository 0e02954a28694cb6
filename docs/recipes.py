"""The numbers in the tables of `recipes.md` and `offload.md` that `zero estimate` predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.models import MODELS, llama
from zero.comm.traffic import IN, OUT
from zero.config import load_config
from zero.errors import rounded
from zero.tools.estimate.machine import DEVICE, DISK, HOST
from zero.tools.estimate.model import build
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import estimate
from zero.tools.estimate.speeds import Speeds, chosen

CONFIGS = Path(__file__).parent.parent / "configs"
# Cards of the GeForce series are in a desktop, whose host memory is slower.
DESKTOP = {"memory": 50.0}
CARDS = {card: chosen(None, f"{card},nvme4", DESKTOP) for card in ("rtx3090", "rtx4090")}
CARDS["h100"] = chosen(None, "h100", {})
CODED = {"zero_quantized_moments": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SMALL = {"sub_group_size": 5e7, "reduce_bucket_size": 2e8, "stage3_prefetch_bucket_size": 2e8}

BLOCK_INPUTS_ON_HOST = {"batch_slices": 8, "cpu_checkpointing": True}


class Recipe(NamedTuple):
    """A run with gradient checkpointing, or in slices.

    Attributes:
        file: of `configs/`; `section` is added to its `zero_optimization`.
        batch: sequences of `length` tokens in a rank's micro-batch.
        adapter: the rank of LoRA on all linear layers, or "".
        quantized: the base is in NF4.
        narrow: there are no fp32 masters.
        slices: `activation_checkpointing`.
    """

    model: str
    file: str
    batch: int
    length: int
    section: dict[str, Any] = {}
    world: int = 1
    accumulation: int = 1
    adapter: str = ""
    quantized: bool = False
    narrow: bool = False
    slices: dict[str, Any] = {}

    def facts(self) -> dict[str, str]:
        """Memory of a rank's device, of the host and of the disk; what is copied between the first
        two; by card, tokens a second and seconds of a step.
        """
        shape = MODELS[self.model]() if self.model in MODELS else llama(*LLAMA_2_7B)
        if shape.is_encoder_decoder:
            shape.dropout_rate = 0.1
        if self.quantized:
            shape.quantization_config = NF4
        config = json.loads((CONFIGS / f"{self.file}.json").read_text(encoding="utf-8"))
        config["zero_optimization"] |= self.section
        config["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": self.narrow}
        config |= {"fp16": {"enabled": False}, "gradient_clipping": 1.0, "train_batch_size": None}
        config["train_micro_batch_size_per_gpu"] = self.batch
        config["gradient_accumulation_steps"] = self.accumulation
        config["activation_checkpointing"] = self.slices
        question = Question(self.world, self.batch, self.length, not self.slices, Speeds())
        model = build(shape, torch.bfloat16, self.adapter)
        found = estimate(model, load_config(config, allow_auto=True), question)
        facts = {}
        for place, ranks in ((DEVICE, 1), (HOST, self.world), (DISK, self.world)):
            size = found.total(place) * ranks / (1 << 30)
            facts[place] = f"{rounded(size)} GiB" if size > 0.1 else "none"
        for link in (IN, OUT):
            facts[link] = f"{rounded(found.traffic.links[link].total() / (1 << 30))} GiB"
        for card, speeds in CARDS.items():
            seconds = found.traffic.seconds(speeds, 2)
            facts[card], facts[f"{card} s"] = rounded(found.tokens / seconds), rounded(seconds)
        return facts


LLAMA_2_7B = 4096, 11008, 32, 32, 32000
RECIPES = {
    "t5-3b": Recipe("t5-3b", "zero3_offload", 32, 512),
    "t5-3b 8-bit": Recipe("t5-3b", "zero3_offload", 32, 512, CODED),
    "t5-3b files": Recipe("t5-3b", "zero3_nvme", 32, 512),
    "t5-3b accumulated": Recipe("t5-3b", "zero3_offload", 8, 512, accumulation=4),
    "t5-11b": Recipe("t5-11b", "zero3_offload", 8, 512),
    "t5-11b 8-bit": Recipe("t5-11b", "zero3_offload", 8, 512, CODED),
    "t5-11b narrow": Recipe("t5-11b", "zero3_offload", 8, 512, CODED, narrow=True),
    "t5-11b files": Recipe("t5-11b", "zero3_nvme", 8, 512),
    "micro-batches": Recipe("t5-3b", "zero3_offload", 4, 512, accumulation=16),
    "slices": Recipe("t5-3b", "zero3_offload", 64, 512, slices={"batch_slices": 16}),
    "logits": Recipe("llama-8b", "zero3_offload", 32, 2048, CODED, slices=BLOCK_INPUTS_ON_HOST),
    "7b": Recipe("llama-2-7b", "zero3_offload", 4, 2048, CODED, narrow=True),
    "7b files": Recipe("llama-2-7b", "zero3_nvme", 4, 2048, SMALL),
    "8b": Recipe("llama-8b", "zero3_offload", 4, 2048, CODED),
    "lora": Recipe("llama-8b", "zero3", 1, 2048, world=8, adapter="16"),
    "qlora": Recipe("llama-8b", "zero3_qlora", 1, 2048, adapter="16", quantized=True),
    "70b": Recipe("llama-70b", "zero3_qlora_offload", 1, 2048, {}, 1, 1, "16", True),
    "70b on 2": Recipe("llama-70b", "zero3_qlora_offload", 1, 2048, {}, 2, 1, "16", True),
    "70b on 8": Recipe("llama-70b", "zero3_qlora", 1, 2048, {}, 8, 1, "16", True),
    "machines": Recipe("llama-8b", "zero3", 4, 2048, world=16),
}

TABLES = {
    "recipes": """
| model | machine | GPU memory | host memory | tokens/s |
|---|---|---|---|---|
| [T5-3B](#t5-3b-translation-on-one-gpu), all weights | one 24 GB GPU | {t5-3b[device]} | {t5-3b[host]} | {t5-3b[rtx4090]} (RTX 4090), {t5-3b[h100]} (H100) |
| [T5-11B](#t5-11b-on-one-24-gb-gpu), all weights | one 24 GB GPU | {t5-11b[device]} | {t5-11b narrow[host]} to {t5-11b[host]} | {t5-11b[rtx4090]} to {t5-11b narrow[rtx4090]} (RTX 4090) |
| [7B](#7b-on-one-24-gb-gpu-with-64-gb-of-host-memory), all weights | one 24 GB GPU, 64 GB of host memory | {7b[device]} | {7b[host]} | {7b[rtx4090]} (RTX 4090) |
| [8B](#8b-on-one-80-gb-gpu), all weights | one 80 GB GPU | {8b[device]} | {8b[host]} | {8b[h100]} (H100), **measured: 2,645** |
| [8B, LoRA](#lora-on-8-gpus) | 8 GPUs | {lora[device]} each | {lora[host]} | {lora[h100]} (H100) |
| [8B, QLoRA](#qlora) | one 12 GB GPU | {qlora[device]} | {qlora[host]} | {qlora[rtx3090]} (RTX 3090), {qlora[rtx4090]} (RTX 4090) |
| [70B, QLoRA](#qlora) | one 24 GB GPU, 64 GB of host memory | {70b[device]} | {70b[host]} | {70b[rtx4090]} (RTX 4090) |
| [GRPO and DPO](#grpo-and-dpo-with-a-reference-model) | 8 GPUs | | | |
| [T5-3B to 0.74B, distillation](#distil-a-t5) | 2 GPUs | 9.2 GiB each | 5.3 GiB | not predicted |
| [8B, two machines](#two-machines) | 2 x 8 GPUs | {machines[device]} each | {machines[host]} | {machines[h100]} (H100) |
""",
    "T5-3B": """
| batch (of a pair of 512 + 512 tokens, 512 are counted) | GPU | host | RTX 4090 | H100 |
|---|---|---|---|---|
| 32 x 512 tokens, `configs/zero3_offload.json` | {t5-3b[device]} | {t5-3b[host]} | {t5-3b[rtx4090]} tokens/s | {t5-3b[h100]} tokens/s |
| with `"zero_quantized_moments": true` | {t5-3b 8-bit[device]} | {t5-3b 8-bit[host]} | {t5-3b 8-bit[rtx4090]} | {t5-3b 8-bit[h100]} |
| with `configs/zero3_nvme.json` ({t5-3b files[disk]} on disk) | {t5-3b files[device]} | {t5-3b files[host]} | {t5-3b files[rtx4090]} | {t5-3b files[h100]} |
| 8 x 512 tokens, four micro-batches per step | {t5-3b accumulated[device]} | {t5-3b accumulated[host]} | {t5-3b accumulated[rtx4090]} | {t5-3b accumulated[h100]} |
| 8 x 512 tokens, no checkpointing, no dropout, **measured** | 41.0 GB | 47.2 GB | | 3,955 |
""",
    "T5-11B": """
| configuration | GPU | host | RTX 4090 | H100 |
|---|---|---|---|---|
| `configs/zero3_offload.json` | {t5-11b[device]} | {t5-11b[host]} | {t5-11b[rtx4090]} tokens/s | {t5-11b[h100]} tokens/s |
| with `"zero_quantized_moments": true` | {t5-11b 8-bit[device]} | {t5-11b 8-bit[host]} | {t5-11b 8-bit[rtx4090]} | {t5-11b 8-bit[h100]} |
| the one below: also without fp32 master weights | {t5-11b narrow[device]} | {t5-11b narrow[host]} | {t5-11b narrow[rtx4090]} | {t5-11b narrow[h100]} |
| `configs/zero3_nvme.json` ({t5-11b files[disk]} on disk) | {t5-11b files[device]} | {t5-11b files[host]} | {t5-11b files[rtx4090]} | {t5-11b files[h100]} |
""",
    "QLoRA": """
| 1 x 2048 tokens per GPU | configuration | each GPU | host memory | tokens/s |
|---|---|---|---|---|
| 8B, one 12 GB GPU | `zero3_qlora.json` | {qlora[device]} | {qlora[host]} | {qlora[rtx3090]} (RTX 3090), {qlora[rtx4090]} (RTX 4090), {qlora[h100]} (H100) |
| 70B, one 24 GB GPU | `zero3_qlora_offload.json` | {70b[device]} | {70b[host]} | {70b[rtx4090]} (RTX 4090) |
| 70B, two 24 GB GPUs | `zero3_qlora_offload.json` | {70b on 2[device]} | {70b on 2[host]} in total | {70b on 2[rtx4090]} (RTX 4090) |
| 70B, eight 24 GB GPUs | `zero3_qlora.json` | {70b on 8[device]} | {70b on 8[host]} | {70b on 8[rtx4090]} (RTX 4090), {70b on 8[h100]} (H100) |
""",
    "slices": """
| T5-3B, 64 x 512 tokens, all in host memory | 16 micro-batches of 4 | 16 slices |
|---|---|---|
| copied to the device in a step | {micro-batches[host to device]} | {slices[host to device]} |
| copied to host memory in a step | {micro-batches[device to host]} | {slices[device to host]} |
| device memory, predicted for an H100 | {micro-batches[device]} | {slices[device]} |
| time of a step, predicted for an H100 | {micro-batches[h100 s]} s | {slices[h100 s]} s |
""",
    "logits": """
| Llama 8B, 32 x 2048 tokens in 8 slices | GPU | host | tokens/s, H100 |
|---|---|---|---|
| 128,256 words, everything in host memory, 8-bit moments, `cpu_checkpointing` | {logits[device]} | {logits[host]} | {logits[h100]} |
""",
    "7B": """
| | without files | with files |
|---|---|---|
| GPU memory | {7b[device]} | {7b files[device]} |
| host memory | {7b[host]} | {7b files[host]} |
| disk | {7b[disk]} | {7b files[disk]} |
| a step | {7b[rtx4090 s]} s, {7b[rtx4090]} tokens/s | {7b files[rtx4090 s]} s, {7b files[rtx4090]} tokens/s |
| the price | stochastic rounding, 8-bit moments | wear of the drive |
""",
}  # fmt: skip


def tables() -> dict[str, str]:
    """Return all tables by their names, in Markdown."""
    facts = {name: recipe.facts() for name, recipe in RECIPES.items()}
    return {name: table.strip().format_map(facts) + "\n" for name, table in TABLES.items()}
