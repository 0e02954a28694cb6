"""Finds the longest sequence that can be trained in a fixed amount of memory, with sharing, tiles
and gradient checkpointing on and off.

    python -m benchmarks.parallel.sequence

A small Llama in fp32 at stage 3, on CPU processes with one thread each. The limit is on what a step
adds to a process's resident memory: activations, and gradients on their way. Each row is one
setting; a process's peak is read from the system. "sharing" is sequence parallelism: all processes
share one sequence, instead of having one each. Activations in host memory (`cpu_checkpointing`) are
left out, because they have no effect on a CPU. The run fails if the first losses differ."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import zero
from benchmarks.measuring import PeakMemory, let_go, timed
from benchmarks.models import build, llama
from benchmarks.runner import Parser, Row, finish, ranks, table
from zero.comm.world import init_distributed
from zero.parallel.sequence import SequenceGroup, current_group, tile_mlps, tiled_loss
from zero.tools.arguments import count

FEATURES = ["sharing", "tiled loss", "tiled MLP", "checkpointing"]
LOSS_TOLERANCE = 1e-5  # of the first loss, which all settings have
MLP_TILES, LOSS_TILES = 8, 16
STEP = 128  # tokens; lengths are multiples of it


class WithLoss(nn.Module):
    """A Llama that returns its loss, with or without logits of all tokens."""

    def __init__(self, sizes: list[int], setting: list[str]):
        super().__init__()
        self.llama = build(llama(*sizes, num_key_value_heads=2), seed=0)
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


def peak_of_step(engine: Any, length: int, group: SequenceGroup | None) -> tuple[int, float, float]:
    """(bytes above those before the step, loss, seconds), the largest of all ranks."""
    generator, vocabulary = torch.Generator().manual_seed(1), engine.module.config.vocab_size
    ids = torch.randint(8, vocabulary, (1, length + 1), generator=generator)
    places = torch.arange(length)[None]
    inputs = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "position_ids": places}
    if group is not None:
        inputs = {key: value.chunk(group.size, dim=1)[group.rank] for key, value in inputs.items()}

    def step() -> float:
        loss = engine(**inputs)
        if group is not None:
            loss = group.mean_loss(loss, inputs["labels"])
        engine.backward(loss)
        engine.step()
        return loss.item()

    let_go()
    with PeakMemory("VmRSS") as peak:
        costs, loss = timed(step)
    found = torch.tensor([float(peak.extra), costs["seconds"]])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found[0]), loss, found[1].item()


def longest(setting: list[str], sizes: list[int], limit: int, most: int) -> Row:
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config)
    group = current_group() if shared > 1 else None
    _, loss, _ = peak_of_step(engine, STEP, group)  # also makes what is made once
    tried: dict[int, tuple[int, float]] = {}

    def fits(length: int) -> bool:
        peak, _, seconds = peak_of_step(engine, length, group)
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
    marks = {feature: "on" if feature in setting else "-" for feature in FEATURES}
    return marks | {"tokens": good, "peak": peak, "seconds": seconds, "first loss": loss}


def search(settings: list[list[str]], **task: Any) -> list[Row]:
    init_distributed()
    return [longest(setting, **task) for setting in settings]


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--processes", type=count, default=2)
    add("--limit-mib", type=count, default=256)
    add("--most-tokens", type=count, default=32768, help="no longer sequence is tried")
    add("--hidden", type=count, default=128)
    add("--layers", type=count, default=4)
    add("--vocabulary", type=count, default=8192)
    parser.add_output()
    args = parser.parse_args()
    # Nothing, each feature alone, all but each one, all.
    settings = [[], *([feature] for feature in FEATURES)]
    settings += [[each for each in FEATURES if each != left_out] for left_out in FEATURES]
    sizes = [args.hidden, 4 * args.hidden, args.layers, 8, args.vocabulary]
    task = {"sizes": sizes, "limit": args.limit_mib << 20, "most": args.most_tokens}
    rows = ranks(search, args.processes, timeout=3600, settings=[*settings, FEATURES], **task)[0]
    columns = {name: name for name in (*FEATURES, "tokens", "x")}
    columns |= {"peak MiB": ("peak", 2**20), "s/step": "seconds"}
    first = rows[0]["first loss"]
    for row in rows:
        row["x"] = row["tokens"] / max(rows[0]["tokens"], 1)
        if abs(row["first loss"] - first) > LOSS_TOLERANCE * first:
            sys.exit(f"error: the first loss is {first}, but not in {row}")
    caption = f"{args.processes} processes, {args.limit_mib} MiB above the model's own"
    finish(args, table(caption, columns, rows), rows=rows)


if __name__ == "__main__":
    main()
