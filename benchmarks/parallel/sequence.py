"""Finds the longest sequence that can be trained in a fixed amount of memory, with sharing, tiles
and gradient checkpointing on and off.

    python -m benchmarks.parallel.sequence

A small Llama in fp32 at stage 3, on CPU processes with one thread each. The limit is on what a step
adds to a process's resident memory: activations, and gradients on their way. Each row is one
setting; a process's peak is read from the system. "sharing" is sequence parallelism: all processes
share one sequence, instead of having one each. Activations in host memory (`cpu_checkpointing`) are
left out, because they have no effect on a CPU."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

import torch

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from zero.tools.arguments import count

FEATURES = ["sharing", "tiled loss", "tiled MLP", "checkpointing"]
LOSS_TOLERANCE = 1e-5  # of the first loss, which all settings have


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument("--limit-mib", type=count, default=256)
    parser.add_argument(
        "--most-tokens", type=count, default=32768, help="no longer sequence is tried"
    )
    parser.add_argument("--hidden", type=count, default=128)
    parser.add_argument("--layers", type=count, default=4)
    parser.add_argument("--vocabulary", type=count, default=8192)
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "sequence.json"
    )
    return parser.parse_args()


def settings() -> list[list[str]]:
    """Nothing, each feature alone, all but each one, all."""
    alone = [[feature] for feature in FEATURES]
    return [
        [],
        *alone,
        *([f for f in FEATURES if f != left_out] for left_out in FEATURES),
        FEATURES,
    ]


def show(row: dict[str, Any], base: int) -> str:
    marks = "".join(f"{'on' if feature in row['setting'] else '-':>15}" for feature in FEATURES)
    numbers = (
        f"{row['tokens']:>10,}{row['tokens'] / max(base, 1):>8.1f}{row['peak'] / 2**20:>10.0f}"
    )
    return f"{marks}{numbers}{row['seconds']:>10.2f}"


def main() -> None:
    args = parse_arguments()
    sizes = {
        "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": args.vocabulary,
        "max_position_embeddings": args.most_tokens,
    }  # fmt: skip
    task = {
        "sizes": sizes,
        "limit": args.limit_mib << 20,
        "most": args.most_tokens,
        "settings": settings(),
    }
    command = ["-m", "benchmarks.parallel.sequence_worker", "--task", json.dumps(task)]
    rows = run_ranks(sys.executable, command, args.processes, timeout=3600)[0]["rows"]
    print(
        f"{args.processes} processes, {args.limit_mib} MiB above the model's own, "
        f"{json.dumps(sizes)}"
    )
    print(
        "".join(f"{feature:>15}" for feature in FEATURES)
        + f"{'tokens':>10}{'x':>8}{'peak MiB':>10}{'s/step':>10}"
    )
    for row in rows:
        print(show(row, rows[0]["tokens"]))
    first = rows[0]["first_loss"]
    if wrong := [row for row in rows if abs(row["first_loss"] - first) > LOSS_TOLERANCE * first]:
        sys.exit(
            f"error: the first loss is {first}, and with {wrong[0]['setting']} it is "
            f"{wrong[0]['first_loss']}"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
    args.output.write_text(
        json.dumps({"arguments": {**vars(args), "output": None}, "machine": machine, "rows": rows})
    )


if __name__ == "__main__":
    main()
