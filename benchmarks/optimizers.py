"""The costs of optimizers, element-wise or on whole tensors: time of a step, bytes of state, bytes sent.

    python -m benchmarks.optimizers

All variants train the same T5 (42M parameters) on the same batches, at each stage. They take turns, so that a busy
machine disturbs all of them alike. Only the time inside `engine.step()` counts, on the slowest rank: the median over
all steps. "AdamW, whole" is AdamW on whole tensors. Compared with "AdamW" it shows the cost of the exchange. The run
fails if a variant's losses differ between stages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Adafactor

import zero
from benchmarks.launch import REPOSITORY, report, run_ranks
from benchmarks.t5 import T5_42M, build_t5, synthetic_batches

STAGES = [2, 3]
SEED, WARMUP = 1, 1
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-4}}}
# Keys of the configuration, and a function that makes the optimizer if the configuration does not.
VARIANTS: dict[str, tuple[dict[str, Any], Any]] = {
    "AdamW": ({}, partial(torch.optim.AdamW, lr=1e-4)),
    "AdamW, whole": ({"elementwise_optimizer": False}, partial(torch.optim.AdamW, lr=1e-4)),
    "Adafactor": ({}, partial(Adafactor, lr=1e-3, relative_step=False, scale_parameter=False)),
    "Muon": (MUON, None),
}
# Largest relative difference of a loss between stages: only the order of sums differs. Muon multiplies in bf16.
LOSS_TOLERANCE = 1e-3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="steps counted, per round")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "out" / "optimizers.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name: str, stage: int, steps: int) -> dict[str, Any]:
    """Run one variant on this rank. Return seconds of each step, losses, bytes of state, bytes sent in a step."""
    keys, make = VARIANTS[name]
    sharding = {"stage": stage} | {key: value for key, value in keys.items() if key != "optimizer"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": sharding,
        **{key: value for key, value in keys.items() if key == "optimizer"},
    }
    model = build_t5(T5_42M, SEED)
    optimizer = None if make is None else make(model.parameters())
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config)
    batches = synthetic_batches(T5_42M["vocab_size"], 1, 8, 8, seed=dist.get_rank())
    seconds, losses, before = [], [], 0
    for batch in islice(batches, WARMUP + steps):
        loss = engine(**batch).loss
        engine.backward(loss)
        dist.barrier()
        before, began = engine.comm.elements["all_to_all"], time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    state = [value for of_one in engine.optimizer.state.values() for value in of_one.values() if torch.is_tensor(value)]
    result = {
        "seconds": seconds[WARMUP:],
        "losses": losses,
        "state": sum(value.nbytes for value in state),
        "sent": 4 * (engine.comm.elements["all_to_all"] - before),
        "parameters": sum(param.numel() for param in model.parameters()),
    }
    engine.destroy()
    return result


def work(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    cases = [(name, stage) for name in VARIANTS for stage in STAGES]
    report([[measure(*case, args.steps) for case in cases] for _ in range(args.rounds)])
    dist.destroy_process_group()


def summarize(reports: list[list[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return a row for each variant and stage. Raises RuntimeError if losses differ between stages."""
    rows, first_losses = [], {}
    for number, (name, stage) in enumerate((name, stage) for name in VARIANTS for stage in STAGES):
        found = [[rounds[number] for rounds in of_rank] for of_rank in reports]
        seconds = [[s for of_round in of_rank for s in of_round["seconds"]] for of_rank in found]
        slowest = [max(each) for each in zip(*seconds, strict=True)]
        last = [of_rank[-1] for of_rank in found]
        parameters = last[0]["parameters"]
        expected = first_losses.setdefault(name, last[0]["losses"])
        if any(abs(a / b - 1) > LOSS_TOLERANCE for a, b in zip(last[0]["losses"], expected, strict=True)):
            raise RuntimeError(f"{name} at stage {stage}: losses {last[0]['losses']}, at another stage {expected}")
        rows.append(
            {
                "optimizer": name,
                "stage": stage,
                "seconds": statistics.median(slowest),
                "state bytes a parameter": max(each["state"] for each in last) / parameters,
                "sent bytes a parameter": sum(each["sent"] for each in last) / parameters,
            }
        )
    return rows


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(args)
        return
    command = ["-m", "benchmarks.optimizers", "--worker", "--rounds", str(args.rounds), "--steps", str(args.steps)]
    rows = summarize(run_ranks(sys.executable, command, args.processes, timeout=3600))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"processes": args.processes, "rows": rows}, indent=1) + "\n")
    print("| optimizer | stage | seconds of a step | state on a rank, bytes/parameter | sent by all, bytes/parameter |")
    print("|---|---|---|---|---|")
    for row in rows:
        numbers = f"{row['seconds']:.2f} | {row['state bytes a parameter']:.2f} | {row['sent bytes a parameter']:.2f}"
        print(f"| {row['optimizer']} | {row['stage']} | {numbers} |")


if __name__ == "__main__":
    main()
