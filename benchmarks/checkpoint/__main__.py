"""Saving and loading a training state of 250M parameters: this engine, FSDP2 with DCP and, if
given, DeepSpeed.

    python -m benchmarks.checkpoint
    python -m benchmarks.checkpoint --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED
    python -m benchmarks.checkpoint --folder FOLDER_ON_THE_DISK_TO_MEASURE

The state consists of fp32 parameters, masters and two moments. Each variant has its own processes.
The variants take turns, because the disk of a shared machine varies in speed. Each saves several
times in a round. The table has medians over all saves:

blocked    seconds until training continues; `first`: in the first save, which allocates memory for
           the copy
step       seconds of the training step before the save; `after`: of the step after it
total      seconds until everything is on disk; with an asynchronous save, the step after it runs
           meanwhile
load       seconds to load with the files in the page cache; `cold`: with an empty page cache
extra MB   largest anonymous memory

`ours-unsynced` leaves out every fsync. The difference is the cost of durability.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from typing import Any

import torch

from benchmarks.arguments import Parser, existing_folder, interpreter, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from zero.tools.arguments import count

OURS = ["ours", "ours-unsynced", "ours-async", "dcp", "dcp-async"]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--deepspeed-python",
        type=interpreter,
        help="interpreter of an environment that has deepspeed",
    )
    parser.add_argument(
        "--variants", nargs="+", choices=[*OURS, "deepspeed"], help="default: all that can run"
    )
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument(
        "--saves", type=count, default=3, help="saves of each variant in each round"
    )
    parser.add_argument("--model", choices=("T5_42M", "T5_250M"), default="T5_250M")
    parser.add_argument(
        "--folder",
        type=existing_folder,
        help="folder to write to; default: the folder of temporary files",
    )
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "checkpoint.json"
    )
    args = parser.parse_args()
    if not args.deepspeed_python and "deepspeed" in (args.variants or []):
        parser.error("deepspeed: needs --deepspeed-python")
    args.variants = args.variants or OURS + (["deepspeed"] if args.deepspeed_python else [])
    return args


def run_variant(variant: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one job of one variant. `benchmarks.checkpoint.worker` says what a rank reports."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = ["-m", "benchmarks.checkpoint.worker", "--variant", variant, "--folder", folder]
        command += ["--saves", str(args.saves), "--model", args.model]
        python, env = sys.executable, {}
        if variant == "deepspeed":
            # Otherwise the launcher of that environment looks for a GPU.
            python, env = args.deepspeed_python, {"DS_ACCELERATOR": "cpu"}
        return run_ranks(python, command, args.processes, 900, env)


def summary(jobs: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Return medians over the saves of all rounds: seconds of the slowest rank, memory of the
    largest.
    """
    saves = [
        of_ranks
        for ranks in jobs
        for of_ranks in zip(*(rank["saves"] for rank in ranks), strict=True)
    ]
    row = {
        name: statistics.median(max(save[name] for save in of_ranks) for of_ranks in saves)
        for name in ("blocked", "step before", "step after", "total", "bytes")
    }
    row["memory"] = max(save["memory"] for of_ranks in saves for save in of_ranks)
    row["blocked first"] = max(rank["saves"][0]["blocked"] for rank in jobs[0])
    for name in ("load", "cold"):
        row[name] = statistics.median(max(rank[name] for rank in ranks) for ranks in jobs)
    return row


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "variant        blocked s  first s   step s  after s  total s   load s   cold s       MB  "
        "extra MB",
    ]
    for variant, row in rows.items():
        seconds = ("blocked", "blocked first", "step before", "step after", "total", "load", "cold")
        cells = [f"{row[name]:7.2f}" for name in seconds] + [
            f"{row[name] / 1e6:7.0f}" for name in ("bytes", "memory")
        ]
        lines.append("  ".join([f"{variant:<15}", *cells]))
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    jobs: dict[str, list[list[dict[str, Any]]]] = {variant: [] for variant in args.variants}
    for number in range(1, args.rounds + 1):
        for variant in args.variants:
            jobs[variant].append(run_variant(variant, args))
            row = summary(jobs[variant][-1:])
            print(
                f"round {number}/{args.rounds} {variant:<10} blocked {row['blocked']:.2f} s  total "
                f"{row['total']:.2f} s"
                f"  load {row['load']:.2f} s  (machine {os.getloadavg()[0]:.1f})",
                flush=True,
            )
    rows = {variant: summary(of_variant) for variant, of_variant in jobs.items()}
    parameters = jobs[args.variants[0]][0][0]["parameters"]
    print(
        f"\nT5 of {parameters / 1e6:.0f}M parameters, fp32, {args.processes} processes; medians of "
        "the saves\n"
    )
    print(table(rows))
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"versions": versions, "rows": rows, "jobs": jobs}, indent=2))
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
