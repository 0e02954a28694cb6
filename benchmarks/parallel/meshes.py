"""Measures step times of this engine and of torch's own parts on data, tensor and pipeline meshes.

    python -m benchmarks.parallel.meshes

Both train the same Llama (4.2M parameters) on the same batches: this engine, and FSDP2 composed
with torch's `parallelize_module` or with `torch.distributed.pipelining`. They take turns, so that a
busy machine disturbs both equally. A ratio is formed within a round, and the median over the rounds
is reported. The run fails if losses differ.

At stage 3 this engine reduces gradients with each micro-batch of a pipeline, and reshards after
each. FSDP2 does both once, with the last one, and keeps whole gradients until then."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from typing import Any

import torch

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from benchmarks.stages.__main__ import relative
from zero.tools.arguments import count

# (pipeline, shard, tensor) and the stage. FSDP2's counterpart of stage 1 keeps weights until
# backward.
CASES = [
    ((1, 1, 2), 3),
    ((1, 2, 2), 3),
    ((2, 1, 1), 3),
    ((2, 1, 1), 1),
    ((2, 2, 1), 3),
    ((2, 2, 1), 1),
]
VARIANTS = ("fsdp2", "zero")
LOSS_TOLERANCE = 1e-5  # relative


def run_variant(
    variant: str, mesh: tuple[int, int, int], stage: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The medians over steps and ranks, and each step's loss: the mean over the ranks that end a
    pipeline.
    """
    options = dict(zip(("pipeline", "shard", "tensor"), mesh, strict=True)) | {"stage": stage}
    options |= {name: getattr(args, name) for name in ("batch", "length", "warmup", "steps")}
    command = ["-m", "benchmarks.parallel.meshes_worker", "--variant", variant]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    ranks = run_ranks(sys.executable, command, mesh[0] * mesh[1] * mesh[2], 600)
    counted = [step for rank in ranks for step in rank["steps"][args.warmup :]]
    wall = statistics.median(step["wall"] for step in counted)
    cpu = statistics.median(step["user"] + step["system"] for step in counted)
    ends = [[step["loss"] for step in rank["steps"]] for rank in ranks if rank["pipeline_end"]]
    return {
        "wall": wall,
        "cpu": cpu,
        "losses": [statistics.mean(of_ranks) for of_ranks in zip(*ends, strict=True)],
    }


def measure(mesh: tuple[int, int, int], stage: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds of one mesh and stage. Exits if the losses differ."""
    rounds = []
    for _ in range(args.rounds):
        found = {variant: run_variant(variant, mesh, stage, args) for variant in VARIANTS}
        difference = relative(*(found[variant].pop("losses") for variant in VARIANTS))
        if not difference <= LOSS_TOLERANCE:
            sys.exit(f"error: {mesh}, stage {stage}: the losses differ by {difference:.1e}")
        rounds.append(found | {"loss_difference": difference, "load": os.getloadavg()[0]})
    row: dict[str, Any] = {"mesh": mesh, "stage": stage, "rounds": rounds}
    for name in ("wall", "cpu"):
        row |= {
            f"{variant}_{name}": statistics.median(each[variant][name] for each in rounds)
            for variant in VARIANTS
        }
        row[f"{name}_ratio"] = statistics.median(
            each["zero"][name] / each["fsdp2"][name] for each in rounds
        )
    row["loss_difference"] = max(each["loss_difference"] for each in rounds)
    return row


def show(row: dict[str, Any]) -> None:
    pipeline, shard, tensor = row["mesh"]
    cells = [f"{shard} x {tensor} x {pipeline}", str(row["stage"])]
    cells += [f"{row[name]:.3f}" for name in ("fsdp2_cpu", "zero_cpu", "fsdp2_wall", "zero_wall")]
    cells += [f"{row[name]:.2f}" for name in ("cpu_ratio", "wall_ratio")]
    print(f"| {' | '.join(cells)} | {row['loss_difference']:.1e} |", flush=True)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--batch", type=count, default=8, help="rows per data rank and step")
    parser.add_argument("--length", type=count, default=64, help="tokens of a row")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count, per round")
    parser.add_argument("--steps", type=count, default=6, help="counted steps, per round")
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "meshes.json"
    )
    args = parser.parse_args()
    print("seconds of a step and process, FSDP2 and zero; ratios are zero / FSDP2\n")
    print(
        "| data x tensor x pipeline | stage | FSDP2 cpu | zero cpu | FSDP2 wall | zero wall | cpu "
        "| wall | loss diff |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for mesh, stage in CASES:
        rows.append(measure(mesh, stage, args))
        show(rows[-1])
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(
        json.dumps({"settings": settings, "versions": versions, "rows": rows}, indent=1) + "\n"
    )
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
