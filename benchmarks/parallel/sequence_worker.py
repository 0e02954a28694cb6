"""The worker of `benchmarks.parallel.sequence`: the longest sequence of each setting, on one rank
or shared by all of them."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import zero
from benchmarks.launch import report
from benchmarks.stages.worker import PeakMemory, let_go
from zero.comm.world import init_distributed
from zero.parallel.sequence import SequenceGroup, current_group, tile_mlps, tiled_loss

MLP_TILES, LOSS_TILES = 8, 16
STEP = 128  # tokens; lengths are multiples of it


class WithLoss(nn.Module):
    """A Llama that returns its loss, with or without logits of all tokens."""

    def __init__(self, sizes: dict[str, int], setting: list[str]):
        super().__init__()
        torch.manual_seed(0)
        self.llama = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
        self.config = self.llama.config
        self.tiled = "tiled loss" in setting
        if "tiled MLP" in setting:
            tile_mlps(self.llama, MLP_TILES)
        if "checkpointing" in setting:
            self.llama.gradient_checkpointing_enable()

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.llama.model(**inputs).last_hidden_state
        if self.tiled:
            return tiled_loss(hidden, self.llama.lm_head, labels, LOSS_TILES)
        return cross_entropy(self.llama.lm_head(hidden).float().flatten(0, 1), labels.flatten())


def peak_of_step(engine: Any, length: int, ranks: SequenceGroup | None) -> tuple[int, float, float]:
    """(bytes above those before the step, loss, seconds), the largest of all ranks."""
    ids = torch.randint(
        8,
        engine.module.config.vocab_size,
        (1, length + 1),
        generator=torch.Generator().manual_seed(1),
    )
    inputs = {
        "input_ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "position_ids": torch.arange(length)[None],
    }
    if ranks is not None:
        inputs = {key: value.chunk(ranks.size, dim=1)[ranks.rank] for key, value in inputs.items()}
    let_go()
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    with PeakMemory() as peak:
        loss = engine(**inputs)
        if ranks is not None:
            loss = ranks.mean_loss(loss, inputs["labels"])
        engine.backward(loss)
        engine.step()
    found = torch.tensor([float(peak.bytes - before), time.perf_counter() - start])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found[0]), loss.item(), found[1].item()


def longest(setting: list[str], sizes: dict[str, int], limit: int, most: int) -> dict[str, Any]:
    """Doubles the length until the limit is passed, then halves the interval down to a sixteenth of
    the length.
    """
    shared = dist.get_world_size() if "sharing" in setting else 1
    model = WithLoss(sizes, setting)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "sequence_parallel_size": shared,
    }
    engine, *_ = zero.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=config
    )
    ranks = current_group() if shared > 1 else None
    _, loss, _ = peak_of_step(engine, STEP, ranks)  # also makes what is made once
    tried: dict[int, tuple[int, float]] = {}

    def fits(length: int) -> bool:
        peak, _, seconds = peak_of_step(engine, length, ranks)
        tried[length] = peak, seconds
        return peak <= limit

    good = 0
    for power in itertools.count():
        length = STEP << power
        if length > most or not fits(length):
            break
        good = length
    bad = length
    while good and bad <= most and bad - good > max(STEP, good // 16):
        middle = (good + bad) // 2 // STEP * STEP
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    engine.destroy()
    peak, seconds = tried.get(good, (0, 0.0))
    return {
        "setting": setting,
        "tokens": good,
        "peak": peak,
        "seconds": seconds,
        "first_loss": loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=json.loads, required=True)
    task = parser.parse_args().task
    init_distributed()
    report(
        {"rows": [longest(s, task["sizes"], task["limit"], task["most"]) for s in task["settings"]]}
    )


if __name__ == "__main__":
    main()
