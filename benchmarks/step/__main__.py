"""Step time and memory of DDP, FSDP2, this engine's ZeRO-3 and, if its environment is given,
DeepSpeed's ZeRO-3.

    python -m benchmarks.step
    python -m benchmarks.step --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED
    python -m benchmarks.step --dtype bf16

All variants train the same T5 (42M parameters) on the same batches, each in its own processes. They
take turns, so that a busy machine disturbs all of them equally. A ratio is formed within a round,
and the median over the rounds is reported. The run fails if losses differ from DDP's."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from typing import Any

import torch

from benchmarks.arguments import Parser, interpreter, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from zero.tools.arguments import count

OURS = ["ddp", "fsdp2", "zero3", "zero3-strict"]
PEERS = ["deepspeed", "deepspeed-strict"]
# Largest relative difference to DDP's loss. In fp32 only the order of sums differs. In bf16 the
# variants round at different places, by up to 2**-8 each: DDP uses autocast over fp32 parameters,
# the others bf16 parameters.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--variants", nargs="+", choices=OURS + PEERS, help="default: all that can run; DDP always"
    )
    parser.add_argument(
        "--deepspeed-python",
        type=interpreter,
        help="interpreter of an environment that has deepspeed",
    )
    parser.add_argument("--dtype", choices=list(LOSS_TOLERANCE), default="fp32")
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument("--batch", type=count, default=8, help="sentences per process and step")
    parser.add_argument(
        "--length", type=count, default=32, help="tokens of each source and of each target"
    )
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--warmup", type=int, default=3, help="steps that do not count, per round")
    parser.add_argument("--steps", type=count, default=4, help="counted steps, per round")
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "step.json"
    )
    args = parser.parse_args()
    available = OURS + (PEERS if args.deepspeed_python else [])
    missing = [name for name in args.variants or [] if name not in available]
    if missing:
        parser.error(f"{', '.join(missing)}: needs --deepspeed-python")
    args.variants = ["ddp"] + [name for name in args.variants or available if name != "ddp"]
    return args


def run_variant(variant: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one job of one variant. `benchmarks.step.worker` says what a rank reports."""
    options = {
        name: getattr(args, name) for name in ("dtype", "batch", "length", "warmup", "steps")
    }
    command = ["-m", "benchmarks.step.worker", "--variant", variant]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    if variant in PEERS:
        # Otherwise the launcher of that environment looks for a GPU.
        return run_ranks(
            args.deepspeed_python, command, args.processes, 600, {"DS_ACCELERATOR": "cpu"}
        )
    return run_ranks(sys.executable, command, args.processes, 600)


def summary(ranks: list[dict[str, Any]], warmup: int) -> dict[str, float]:
    """Return medians over the counted steps and the ranks (seconds), and the largest rank's memory
    (MB).
    """
    counted = [step for rank in ranks for step in rank["steps"][warmup:]]
    result = {
        name: statistics.median(step[name] for step in counted)
        for name in ("wall", "user", "system")
    }
    result["cpu"] = statistics.median(step["user"] + step["system"] for step in counted)
    result["rss_steady"] = max(
        statistics.median(step["rss"] for step in rank["steps"][warmup:]) for rank in ranks
    )
    result["rss_peak"] = max(rank["rss_peak"] for rank in ranks)
    result["rss_imported"] = max(rank["rss_imported"] for rank in ranks)
    return result


def loss_difference(ranks: list[dict[str, Any]], reference: list[dict[str, Any]]) -> float:
    """Return the largest relative difference of a loss to the reference's, over all ranks and
    steps.
    """
    pairs = [
        (step["loss"], other["loss"])
        for rank, other_rank in zip(ranks, reference, strict=True)
        for step, other in zip(rank["steps"], other_rank["steps"], strict=True)
    ]
    return max(abs(loss - expected) / abs(expected) for loss, expected in pairs)


def over_rounds(rounds: list[dict[str, dict[str, float]]], variant: str) -> dict[str, float]:
    """Return medians over the rounds. Ratios to DDP are formed within a round."""
    names = rounds[0][variant]
    row = {name: statistics.median(entry[variant][name] for entry in rounds) for name in names}
    for name in ("wall", "user", "cpu"):
        row[f"{name}_ratio"] = statistics.median(
            entry[variant][name] / entry["ddp"][name] for entry in rounds
        )
    return row


def table(rows: dict[str, dict[str, float]]) -> str:
    columns = [
        "user s",
        "sys s",
        "wall s",
        "user/DDP",
        "cpu/DDP",
        "wall/DDP",
        "steady MB",
        "peak MB",
        "loss diff",
    ]
    lines = ["  ".join([f"{'variant':<16}", *(f"{name:>9}" for name in columns)])]
    for variant, row in rows.items():
        cells = [f"{row[name]:9.3f}" for name in ("user", "system", "wall")]
        cells += [f"{row[name]:9.2f}" for name in ("user_ratio", "cpu_ratio", "wall_ratio")]
        cells += [f"{row[name]:9.0f}" for name in ("rss_steady", "rss_peak")]
        lines.append("  ".join([f"{variant:<16}", *cells, f"{row['loss_difference']:9.1e}"]))
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    rounds: list[dict[str, dict[str, float]]] = []
    reference: list[dict[str, Any]] = []
    parameters = 0
    for number in range(1, args.rounds + 1):
        rounds.append({})
        for variant in args.variants:
            ranks = run_variant(variant, args)
            parameters = ranks[0]["parameters"]
            reference = ranks if variant == "ddp" else reference
            row = summary(ranks, args.warmup) | {
                "loss_difference": loss_difference(ranks, reference)
            }
            rounds[-1][variant] = row
            print(
                f"round {number}/{args.rounds}  {variant:<16}  user {row['user']:.3f} s  system "
                f"{row['system']:.3f} s"
                f"  wall {row['wall']:.3f} s  load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            if row["loss_difference"] > LOSS_TOLERANCE[args.dtype]:
                sys.exit(
                    f"error: {variant}'s losses differ from DDP's by {row['loss_difference']:.1e},"
                    f" more than {LOSS_TOLERANCE[args.dtype]:.0e}: it does not compute the same "
                    "training"
                )
    rows = {variant: over_rounds(rounds, variant) for variant in args.variants}
    print(
        f"\nT5 of {parameters / 1e6:.1f}M parameters, {args.processes} processes of one thread, "
        f"{args.dtype},"
        f" {args.batch} sentences of {args.length} + {args.length} tokens per process; per step "
        "and process\n"
    )
    print(table(rows))
    settings = {
        name: value
        for name, value in vars(args).items()
        if name not in ("output", "deepspeed_python")
    }
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(
        json.dumps(
            {
                "settings": settings,
                "versions": versions,
                "parameters": parameters,
                "rows": rows,
                "rounds": rounds,
            },
            indent=2,
        )
    )
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
