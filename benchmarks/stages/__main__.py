"""Stages 0 to 3 on 1, 2 and 4 processes: model states and the ZeRO paper's formula, memory, time,
loss curves.

    python -m benchmarks.stages

For each number of processes and each stage the table has: the bytes of parameters, gradients and
optimizer state that a rank really holds for a T5 of 42M parameters in bf16, read from the engine's
tensors; the same by formula; peak resident memory; and the time of a step in fp32 as a ratio to
stage 0, measured in turns. Then every stage trains a tiny T5 for a few hundred steps on 2
processes, in fp32 and bf16, and so does plain torch. The losses are plotted. The run fails if a
measured size differs from the formula, or the losses of a stage differ from those of stage 0.

The formula is that of arXiv 1910.02054, section 5, for Adam: 2 bytes per parameter for
16-bit parameters, 2 for 16-bit gradients, 12 for fp32 masters and moments. Each is divided by the
number of ranks starting with the stage that shards it. This engine differs in the gradients: see
`expected_bytes`."""

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
from benchmarks.stages.worker import ACCUMULATION, STAGES
from zero.tools.arguments import above_zero, count

OPTIMIZER_BYTES = 12
# Largest relative difference between a measured size and the formula: groups are padded.
SIZE_TOLERANCE = 1e-3
# Largest relative difference of a loss to that of stage 0 in fp32: only the order of sums differs.
LOSS_TOLERANCE = 1e-4
PARTS = ["parameters", "gradients", "optimizer", "accumulated"]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--world-sizes", nargs="+", type=count, default=[1, 2, 4])
    parser.add_argument("--batch", type=count, default=4, help="sentences per process and step")
    parser.add_argument(
        "--length", type=count, default=16, help="tokens of each source and of each target"
    )
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--steps", type=count, default=3, help="counted steps, per round")
    parser.add_argument(
        "--train-steps", type=count, default=300, help="steps of the short training"
    )
    parser.add_argument(
        "--learning-rate", type=above_zero, default=3e-3, help="learning rate of the short training"
    )
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "stages.json"
    )
    return parser.parse_args()


def paper_bytes(parameters: int, stage: int, ranks: int) -> float:
    """Return one rank's model states by arXiv 1910.02054, section 5 (P_os, P_os+g and P_os+g+p:
    stages 1, 2 and 3).
    """
    return parameters * (
        2 / (ranks if stage >= 3 else 1)
        + 2 / (ranks if stage >= 2 else 1)
        + OPTIMIZER_BYTES / (ranks if stage >= 1 else 1)
    )


def expected_bytes(parameters: int, stage: int, ranks: int) -> dict[str, float]:
    """Return the bytes that this engine should hold of each part, with accumulation, which the
    paper does not mention.

    16-bit gradients exist only until their group is reduced. Then the sum of the rank's own part is
    kept in fp32: 4 bytes a parameter at stage 0, 4 / ranks from stage 1 on. Stages 0 and 1 also
    hold the rank's own sum over micro-batches in fp32 ("accumulated")."""
    part = parameters / (ranks if stage >= 1 else 1)
    return {
        "parameters": 2 * parameters / (ranks if stage >= 3 else 1),
        "gradients": 4 * part,
        "optimizer": OPTIMIZER_BYTES * part,
        "accumulated": 4 * parameters if stage <= 1 else 0,
    }


def check_sizes(row: dict[str, Any]) -> None:
    for name, expected in row["expected"].items():
        if abs(row["measured"][name] - expected) > SIZE_TOLERANCE * row["paper"]:
            sys.exit(
                f"error: stage {row['stage']} on {row['ranks']} ranks holds "
                f"{row['measured'][name]} bytes of {name}, "
                f"not {expected:.0f}"
            )


def rows_of(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each stage: bytes of the largest rank, and median seconds over ranks,
    rounds and steps.

    A ratio to stage 0 is formed within a round. The median over the rounds is taken.
    """
    count, parameters = len(ranks), ranks[0]["parameters"]
    rounds = range(len(ranks[0]["rounds"]))

    def seconds(kind: str, number: int, stage: int) -> float:
        return statistics.median(
            value for rank in ranks for value in rank["rounds"][number][stage][kind]
        )

    rows = []
    for stage in STAGES:
        row: dict[str, Any] = {
            "ranks": count,
            "stage": stage,
            "paper": paper_bytes(parameters, stage, count),
        }
        row["expected"] = expected_bytes(parameters, stage, count)
        row["measured"] = {
            name: max(rank["memory"][stage][name] for rank in ranks) for name in PARTS
        }
        row["peak"] = max(rank["memory"][stage]["peak"] for rank in ranks)
        for kind in ("wall", "cpu"):
            row[kind] = statistics.median(seconds(kind, number, stage) for number in rounds)
            row[f"{kind}_ratio"] = statistics.median(
                seconds(kind, number, stage) / seconds(kind, number, 0) for number in rounds
            )
        check_sizes(row)
        rows.append(row)
    check_losses(ranks)
    return rows


def check_losses(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(ranks):
        for stages in result["rounds"]:
            for stage, measured in enumerate(stages):
                difference = relative(measured["losses"], stages[0]["losses"])
                if difference > LOSS_TOLERANCE:
                    sys.exit(
                        f"error: stage {stage} on rank {rank}: losses differ from stage 0's by "
                        f"{difference:.1e}"
                    )


def relative(losses: list[float], reference: list[float]) -> float:
    return max(
        abs(loss - other) / abs(other) for loss, other in zip(losses, reference, strict=True)
    )


def table(rows: list[dict[str, Any]], parameters: int) -> str:
    """Return the table: model states in bytes a parameter, memory in MB, seconds."""
    columns = [
        "params",
        "grads",
        "optim",
        "sum",
        "formula",
        "paper",
        "accum",
        "peak MB",
        "cpu s",
        "cpu/0",
        "wall/0",
    ]
    lines = ["  ".join(["ranks", "stage", *(f"{name:>7}" for name in columns)])]
    for row in rows:
        states = [row["measured"][name] for name in ("parameters", "gradients", "optimizer")]
        formula = sum(value for name, value in row["expected"].items() if name != "accumulated")
        sizes = [*states, sum(states), formula, row["paper"], row["measured"]["accumulated"]]
        cells = [f"{size / parameters:7.3f}" for size in sizes] + [
            f"{row['peak'] / 1e6:7.0f}",
            f"{row['cpu']:7.3f}",
        ]
        cells += [f"{row[name]:7.2f}" for name in ("cpu_ratio", "wall_ratio")]
        lines.append("  ".join([f"{row['ranks']:5d}", f"{row['stage']:5d}", *cells]))
    return "\n".join(lines)


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Plot all losses (left), and the distance of each fp32 stage to plain torch (right)."""
    import matplotlib  # imported here, so that the table needs no matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    plain = curves["plain torch, fp32"]
    left.plot(plain, color="black", linewidth=7, alpha=0.2, label="plain torch, fp32")
    for name, losses in curves.items():
        if name == "plain torch, fp32":
            continue
        stage, bf16 = int(name.split()[1].rstrip(",")), name.endswith("bf16")
        # The curves lie on each other, so later ones are thinner.
        left.plot(
            losses,
            color=f"C{stage}",
            linewidth=4 - stage,
            linestyle=":" if bf16 else "-",
            label=name,
        )
        if not bf16:
            distance = [max(abs(a - b) / b, 1e-9) for a, b in zip(losses, plain, strict=True)]
            right.semilogy(distance, color=f"C{stage}", linewidth=4 - stage, label=name)
    left.set(xlabel="step", ylabel="loss", title="A tiny T5 on 2 ranks")
    right.set(
        xlabel="step", ylabel="|loss / plain torch's - 1|", title="fp32: distance to plain torch"
    )
    left.legend(fontsize="small")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def short_training(args: argparse.Namespace) -> dict[str, list[float]]:
    options = ["--steps", str(args.train_steps), "--learning-rate", str(args.learning_rate)]
    ranks = run_ranks(
        sys.executable, ["-m", "benchmarks.stages.worker", "--task", "train", *options], 2, 1800
    )
    return ranks[0]["curves"]


def main() -> None:
    args = parse_arguments()
    curves = short_training(args)
    plain = curves["plain torch, fp32"]
    print(f"{'short training':<20}  {'first':>7}  {'last':>7}  largest difference to plain torch")
    for name, losses in curves.items():
        print(
            f"{name:<20}  {losses[0]:7.4f}  {losses[-1]:7.4f}  {relative(losses, plain):.1e}",
            flush=True,
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    picture = args.output.with_suffix(".png")
    plot(curves, picture)

    rows, parameters = [], 0
    for size in args.world_sizes:
        names = ("batch", "length", "rounds", "steps")
        options = [text for name in names for text in (f"--{name}", str(getattr(args, name)))]
        ranks = run_ranks(
            sys.executable,
            ["-m", "benchmarks.stages.worker", "--task", "cost", *options],
            size,
            1800,
        )
        parameters = ranks[0]["parameters"]
        rows += rows_of(ranks)
        print(f"measured on {size} processes, load {os.getloadavg()[0]:.1f}", flush=True)
    print(
        f"\nT5 of {parameters / 1e6:.1f}M parameters. Model states of a rank, bytes a parameter, "
        "bf16, accumulation "
        f"{ACCUMULATION};\nseconds of a step of {args.batch} x ({args.length} + {args.length}) "
        "tokens a process, fp32\n"
    )
    print(table(rows, parameters))
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    result = {
        "settings": settings,
        "versions": versions,
        "parameters": parameters,
        "rows": rows,
        "curves": curves,
    }
    args.output.write_text(json.dumps(result, indent=2))
    print(f"\nwritten: {args.output}, {picture}")


if __name__ == "__main__":
    main()
