"""Compares implementations of each collective, on gloo, or on NCCL if there are GPUs: is the
engine's the fastest?

    python -m benchmarks.collectives
    python -m benchmarks.collectives --ranks 4 --sizes-mb 1 10 100 1000

Implementations ("ways"): torch's own call; messages from rank to rank, with sums in the order of
ranks; for an all-gather, a broadcast by each rank; for a reduce-scatter, an all-to-all and a local
sum; and "engine", the method of `zero.comm.communicator.Communicator`. Sizes and bandwidths are
defined as in NCCL's own benchmark: a size is that of the whole buffer, ranks * n elements of fp32.

    algorithm bandwidth = size / time
    bus bandwidth       = algorithm bandwidth * (2 (ranks - 1) / ranks for an all-reduce or
                        gradients,
                          (ranks - 1) / ranks for an all-gather and a reduce-scatter, 1 for a
                          broadcast)

"gradients 512" and "gradients 64" are an experiment with buckets: an all-reduce of a model's
gradients, which are vectors of this many elements and square matrices of this width, one by one or
copied into one bucket and back.

The slowest rank gives the time of an operation. `/ engine`: ratio to the engine's time in the same
repeat, median over the repeats. `cpu ms`: median over ranks, all threads of a rank. 0.002 MB is the
size of a vector of gradient norms."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from zero.tools.arguments import above_zero, count

# Bus bandwidth / algorithm bandwidth, by the number of ranks.
BUS = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "gradients 512": lambda ranks: 2 * (ranks - 1) / ranks,
    "gradients 64": lambda ranks: 2 * (ranks - 1) / ranks,
}


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--ranks",
        type=count,
        default=torch.cuda.device_count() or 2,
        help="default: one for each GPU, or 2",
    )
    parser.add_argument(
        "--sizes-mb",
        type=above_zero,
        nargs="+",
        default=[0.002, 1, 10, 100],
        help="millions of bytes",
    )
    parser.add_argument(
        "--repeats", type=count, default=50, help="at most; there are fewer of large sizes"
    )
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "collectives.json"
    )
    args = parser.parse_args()
    if torch.cuda.is_available() and args.ranks > torch.cuda.device_count():
        parser.error(
            f"--ranks {args.ranks}: there are {torch.cuda.device_count()} GPUs, and each rank "
            "needs one"
        )
    return args


def slowest(ranks: list[dict[str, Any]], number: int, operation: str, way: str) -> list[float]:
    """Return the slowest rank's seconds of each repeat, at size number `number`."""
    each = [[wall for wall, _ in rank["sizes"][number][operation][way]] for rank in ranks]
    return [max(of_ranks) for of_ranks in zip(*each, strict=True)]


def rows_of(ranks: list[dict[str, Any]], sizes: list[float]) -> list[dict[str, Any]]:
    """Return one row for each operation, size and way, in milliseconds and GB/s."""
    rows = []
    for operation, by_way in ranks[0]["sizes"][0].items():
        for number, size in enumerate(sizes):
            engine = slowest(ranks, number, operation, "engine")
            for way in by_way:
                seconds = slowest(ranks, number, operation, way)
                cpu = [cpu for rank in ranks for _, cpu in rank["sizes"][number][operation][way]]
                median = statistics.median(seconds)
                bandwidth = size * 1e6 / median / 1e9
                rows.append(
                    {
                        "operation": operation,
                        "mb": size,
                        "way": way,
                        "ms": median * 1e3,
                        "least_ms": min(seconds) * 1e3,
                        "cpu_ms": statistics.median(cpu) * 1e3,
                        "algorithm_gb_per_s": bandwidth,
                        "bus_gb_per_s": bandwidth * BUS[operation](len(ranks)),
                        "to_engine": statistics.median(
                            a / b for a, b in zip(seconds, engine, strict=True)
                        ),
                    }
                )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    titles = [
        f"{title:>9}" for title in ("ms", "least", "cpu ms", "alg GB/s", "bus GB/s", "/ engine")
    ]
    lines = ["  ".join([f"{'operation':<14}", f"{'MB':>7}", f"{'way':<16}", *titles])]
    for row in rows:
        cells = [
            f"{row[name]:9.3f}"
            for name in ("ms", "least_ms", "cpu_ms", "algorithm_gb_per_s", "bus_gb_per_s")
        ]
        cells.append(f"{row['to_engine']:9.2f}")
        lines.append(
            "  ".join([f"{row['operation']:<14}", f"{row['mb']:>7g}", f"{row['way']:<16}", *cells])
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the bus bandwidth by size: a panel for each operation, a line for each way."""
    import matplotlib  # imported here, so that the table needs no matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7), layout="constrained")
    for axis, operation in zip(axes.flat, BUS, strict=True):
        found = [row for row in rows if row["operation"] == operation]
        for way in dict.fromkeys(row["way"] for row in found):
            points = [(row["mb"], row["bus_gb_per_s"]) for row in found if row["way"] == way]
            style = (
                {"color": "black", "linewidth": 5, "alpha": 0.25}
                if way == "engine"
                else {"marker": "o"}
            )
            axis.loglog(*zip(*points, strict=True), label=way, **style)
        axis.set(xlabel="MB", ylabel="bus bandwidth, GB/s", title=operation)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    args = parse_arguments()
    command = [
        "-m",
        "benchmarks.collectives.worker",
        "--sizes-mb",
        *(str(size) for size in args.sizes_mb),
    ]
    command += ["--repeats", str(args.repeats)]
    ranks = run_ranks(sys.executable, command, args.ranks, 1800)
    rows = rows_of(ranks, args.sizes_mb)
    backend = "NCCL" if ranks[0]["device"] == "cuda" else "gloo"
    print(f"{backend}, {args.ranks} ranks, fp32, load {os.getloadavg()[0]:.1f}\n\n{table(rows)}")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    result = {
        "backend": backend,
        "ranks": args.ranks,
        "versions": versions,
        "rows": rows,
        "samples": ranks,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2))
    plot(rows, args.output.with_suffix(".png"))
    print(f"\nwritten: {args.output}, {args.output.with_suffix('.png')}")


if __name__ == "__main__":
    main()
