"""Measures time and memory of a training step on GPUs: DDP, FSDP2, this engine and, if given,
DeepSpeed.

    python -m benchmarks.gpu
        # Llama-3.2-1B's shape, 4 x 2048 tokens
    python -m benchmarks.gpu --model t5-3b --batch 8 --length 512 --variants zero3-offload
    python -m benchmarks.gpu --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED

All variants train the same model in bf16 with fp32 masters on the same batch, each in its own
processes, one per GPU. With several rounds, they take turns. Ratios to the base are formed within a
round. The base is the first variant that finished in each round. `issued`: seconds until the host
has given all work of a step to the GPU. If it is close to the step's time, the host is the limit. A
variant fails if a loss differs from the base's by more than 2%, or the decrease from the first to
the last loss by more than 10%. A failed variant is named while the others continue, and the exit
code is then 1."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.arguments import Parser, interpreter, result_file
from benchmarks.gpu.worker import MODELS, VARIANTS, flops
from benchmarks.launch import REPOSITORY, run_ranks
from benchmarks.offload.__main__ import cause, table_of_waits
from zero.tools.arguments import count

# bf16: the variants round at different places, by up to 2**-8 each.
LOSS_TOLERANCE = 2e-2
# From the first loss to the last one, relative to the base's fall. In a short run, losses that do
# not move are near the base's. On one H100 rounding moved losses by 0.002 of them, where they fell
# by 0.2 of them.
FALL_TOLERANCE = 0.1
TOLERANCES = {"loss_difference": LOSS_TOLERANCE, "fall_difference": FALL_TOLERANCE}

Row = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama-1b")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), help="default: all without offload"
    )
    parser.add_argument(
        "--deepspeed-python",
        type=interpreter,
        help="interpreter of an environment that has deepspeed",
    )
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--batch", type=count, default=4, help="sequences per GPU and step")
    parser.add_argument("--length", type=count, default=2048, help="tokens of a sequence")
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute the activations of each block"
    )
    parser.add_argument("--rounds", type=count, default=1)
    parser.add_argument("--warmup", type=int, default=3, help="steps that do not count, per round")
    parser.add_argument("--steps", type=count, default=10, help="steps counted, per round")
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "gpu.json"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: `python -m benchmarks.step` compares the engines on CPUs")
    args.variants = args.variants or [
        name for name in VARIANTS if "off" not in name and "-opt" not in name
    ]
    if not args.deepspeed_python:
        args.variants = [name for name in args.variants if not name.startswith("deepspeed")]
    return args


def run(variant: str, args: argparse.Namespace) -> Row:
    """Run one job.

    Return the slowest rank's seconds, the largest memory and the losses of rank 0.
    """
    options = {
        name: getattr(args, name) for name in ("model", "batch", "length", "warmup", "steps")
    }
    command = ["-m", "benchmarks.gpu.worker", "--variant", variant]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command += ["--checkpointing"] if args.checkpointing else []
    python = args.deepspeed_python if variant.startswith("deepspeed") else sys.executable
    threads = str(max(1, (os.cpu_count() or 1) // args.gpus))
    ranks = run_ranks(python, command, args.gpus, 600, {"OMP_NUM_THREADS": threads})
    row = {
        name: max(rank[name] for rank in ranks)
        for name in ("seconds", "issued", "cpu", "device", "reserved", "host")
    }
    return row | {
        name: ranks[0][name] for name in ("losses", "parameters", "phases", "waits", "name")
    }


def one_round(args: argparse.Namespace, missing: dict[str, str]) -> dict[str, Row]:
    """Run each variant once. Those that fail get a reason in `missing`."""
    rows: dict[str, Row] = {}
    for variant in args.variants:
        try:
            row = rows[variant] = run(variant, args)
        except RuntimeError as error:
            missing[variant] = cause(str(error))
            print(f"{variant}: failed: {missing[variant]}", flush=True)
            continue
        print(f"{variant}: {row['seconds']:.4f} s, {row['device'] / 1e9:.2f} GB", flush=True)
    return rows


def distances(losses: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Return how far losses are from the base's: the largest relative distance, and that of the
    whole fall.
    """
    found, expected = torch.tensor([losses, base], dtype=torch.float64)
    fall, expected_fall = (each[0] - each[-1] for each in (found, expected))
    return {
        "loss_difference": ((found - expected).abs() / expected.abs())
        .max()
        .item(),  # NaN if one is NaN
        # Where the base's losses do not fall, no fall is near theirs.
        "fall_difference": ((fall - expected_fall).abs() / expected_fall).item()
        if expected_fall > 0
        else math.inf,
    }


def summary(
    rounds: Sequence[dict[str, Row]], variants: Sequence[str], missing: dict[str, str]
) -> tuple[str, dict[str, Row]]:
    """Return the base, which is the first variant that finished in each round, and each variant's
    medians.

    Variants whose losses are not those of the base get a reason in `missing`. Exits if there is no
    base."""
    base = next(
        (variant for variant in variants if all(variant in found for found in rounds)), None
    )
    if base is None:
        reasons = "\n".join(f"{variant}: {reason}" for variant, reason in missing.items())
        sys.exit(
            f"no variant finished in all {len(rounds)} rounds, so nothing can be "
            f"compared\n{reasons}"
        )
    rows: dict[str, Row] = {}
    for variant in variants:
        each = []
        for found in (found for found in rounds if variant in found):
            row, first = found[variant], found[base]
            each.append(
                row
                | {"ratio": row["seconds"] / first["seconds"]}
                | distances(row["losses"], first["losses"])
            )
            if not all(
                each[-1][name] <= limit for name, limit in TOLERANCES.items()
            ):  # NaN is not within
                missing[variant] = (
                    f"not the same training: losses are {each[-1]['loss_difference']:.1e} from "
                    f"{base}'s (allowed: "
                    f"{LOSS_TOLERANCE:g}), their fall {each[-1]['fall_difference']:.1e} (allowed: "
                    f"{FALL_TOLERANCE:g})"
                )
        if each:
            rows[variant] = {
                name: statistics.median(row[name] for row in each)
                if isinstance(value, int | float)
                else value
                for name, value in each[-1].items()
            }
    return base, rows


def table(rows: dict[str, Row]) -> str:
    columns = [
        "step s",
        "/ base",
        "tokens/s",
        "TFLOP/s",
        "issued s",
        "cpu s",
        "GPU GB",
        "host GB",
        *TOLERANCES,
    ]
    lines = ["  ".join([f"{'variant':<20}", *(f"{name:>9}" for name in columns)])]
    for variant, row in rows.items():
        cells = [f"{row['seconds']:9.4f}", f"{row['ratio']:9.3f}", f"{row['tokens']:9.0f}"]
        cells += [f"{row['flops'] / 1e12:9.1f}", f"{row['issued']:9.4f}", f"{row['cpu']:9.3f}"]
        cells += [f"{row[name] / 1e9:9.2f}" for name in ("device", "host")]
        cells += [f"{row[name]:15.1e}" for name in TOLERANCES]
        lines.append("  ".join([f"{variant:<20}", *cells]))
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    missing: dict[str, str] = {}
    args.flops = flops(args.model, args.batch, args.length)
    rounds = [one_round(args, missing) for _ in range(args.rounds)]
    base, rows = summary(rounds, args.variants, missing)
    for row in rows.values():
        row["flops"] = args.gpus * args.flops / row["seconds"]
        row["tokens"] = args.gpus * args.batch * args.length / row["seconds"]
    some = rows[base]
    checkpointing = ", checkpointing" if args.checkpointing else ""
    print(
        f"\n{args.model}, {some['parameters'] / 1e6:.0f}M parameters, {args.gpus} x {some['name']},"
        f" {args.batch} x {args.length} tokens a GPU{checkpointing}; the base is "
        f"{base}\n\n{table(rows)}\n\n"
        f"seconds of a step by phase, as the host sees them\n{table_of_waits(rows)}"
    )
    settings = {
        name: value
        for name, value in vars(args).items()
        if name not in ("output", "deepspeed_python")
    }
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"settings": settings, "versions": versions, "missing": missing, "base": base}
    args.output.write_text(json.dumps(result | {"rows": rows, "rounds": rounds}, indent=2))
    print(f"\nwritten: {args.output}")
    for variant, reason in missing.items():
        print(f"{variant}: {reason}")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
