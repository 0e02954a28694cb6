"""Repeats the published guides' small experiments, in their sizes, on this engine and plain torch.

    python -m benchmarks.guide
    python -m benchmarks.guide --parts training activations --width 256 --rows 320 --epochs 3

training     An MLP of 1000, 4000, 4000 and 1 values learns 10,000 random rows with Adam (1e-3),
             batch 32, 10 epochs: plain torch on the whole batch, and stages 0 to 3 on 2 ranks:
             seconds, bytes of model states, losses.
activations  What autograd keeps for backward, without and with gradient checkpointing, and what
             stays on the device if it moves to host memory (`cpu_checkpointing`). Counted in bytes
             of distinct storages, without parameters.
meshes       A rank's bytes per parameter for each stage and each mesh on 1, 2, 4, 8 ranks: data x
             tensor x pipeline, or data x sequence.
claims       "4, 8 and 64 times less memory" for T5-3B at stages 1, 2 and 3, compared with
             `zero estimate`.

The run fails if the losses of a stage differ from those of plain torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from benchmarks.models import t5_config
from benchmarks.offload.worker import MODELS
from benchmarks.stages.__main__ import paper_bytes, relative
from zero.tools.arguments import count

PARTS = ("training", "activations", "meshes", "claims")
LOSS_TOLERANCE = 1e-4  # of the mean loss of an epoch
Rows = list[dict[str, Any]]


def worker(ranks: int, part: str, args: argparse.Namespace) -> list[Any]:
    sizes = [
        text
        for name in ("width", "rows", "epochs")
        for text in (f"--{name}", str(getattr(args, name)))
    ]
    found = run_ranks(
        sys.executable, ["-m", "benchmarks.guide.worker", "--part", part, *sizes], ranks, 3600
    )
    return [each["rows"] for each in found]


def training(args: argparse.Namespace) -> Rows:
    rows = worker(2, "training", args)[0]
    for row in rows:
        difference = relative(row["losses"], rows[0]["losses"])
        if not difference <= LOSS_TOLERANCE:
            show("training", rows)
            sys.exit(f"error: {row['run']}: losses differ from plain torch's by {difference:.1e}")
    return rows


def activations(args: argparse.Namespace) -> Rows:
    return worker(1, "activations", args)[0]


def meshes(args: argparse.Namespace) -> Rows:
    """The largest rank of each mesh and stage, with the paper's formula for a part of 1 / (tensor x
    pipeline).
    """
    rows = []
    for world in args.worlds:
        for of_ranks in zip(*worker(world, "meshes", args), strict=True):
            row = max(of_ranks, key=lambda each: each["states"])
            part = row["elements"] / (row["tensor"] * row["pipeline"])
            rows.append(
                row
                | {
                    "paper": paper_bytes(part, row["stage"], row["data"] * row["sequence"]),
                    "ranks": world,
                }
            )
        print(f"meshes: {world} ranks", flush=True)
    return rows


def claims(args: argparse.Namespace) -> Rows:
    import torch

    from zero.config import load_config
    from zero.tools.estimate.model import build, fill_in
    from zero.tools.estimate.question import Question
    from zero.tools.estimate.rank import estimate

    shape = t5_config(MODELS["t5-3b"])
    shape.architectures = ["T5ForConditionalGeneration"]
    model, rows = build(shape, torch.bfloat16), []
    for stage, ranks in [(0, 1), (3, 1), (1, 8), (2, 8), (3, 8), (1, 64), (2, 64), (3, 64)]:
        keys = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage},
        }
        found = estimate(model, fill_in(load_config(keys), shape), Question(ranks))
        rows.append(
            {"stage": stage, "ranks": ranks, "paper": paper_bytes(found.elements, stage, ranks)}
        )
        rows[-1] |= {"estimate": found.total("device"), "parameters": found.elements}
        rows[-1] |= {"times_less": rows[0]["paper"] / rows[-1]["paper"]}
    return rows


def plot(rows: Rows, path: Path) -> None:
    """Loss by epoch: all runs on one picture."""
    import matplotlib  # imported here, so that the numbers need no matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, row in enumerate(rows):
        # The curves lie on each other, so later ones are thinner.
        epochs = range(1, len(row["losses"]) + 1)
        axis.semilogy(
            epochs,
            row["losses"],
            linewidth=7 - 1.3 * number,
            label=row["run"],
            alpha=0.3 if not number else 1,
        )
    axis.set(xlabel="epoch", ylabel="mean loss", title="The guide's MLP on random rows, 2 ranks")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def show(part: str, rows: Rows) -> None:
    print(f"\n{part}")
    for row in rows:
        print("  " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--width", type=count, default=4000, help="of the MLP's hidden layers")
    parser.add_argument("--rows", type=count, default=10_000)
    parser.add_argument("--epochs", type=count, default=10)
    parser.add_argument(
        "--worlds",
        type=count,
        nargs="+",
        default=[1, 2, 4, 8],
        help="numbers of ranks of the meshes",
    )
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "guide.json"
    )
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result = {}
    for part in args.parts:
        result[part] = globals()[part](args)
        show(part, result[part])
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    if "training" in result:
        plot(result["training"], args.output.with_suffix(".png"))
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
