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

import sys
from argparse import Namespace

import torch

from benchmarks.guide import worker
from benchmarks.models import MODELS
from benchmarks.runner import Parser, Row, Table, draw, finish, ranks, relative, table
from benchmarks.stages.__main__ import paper_bytes
from zero.tools.arguments import count

LOSS_TOLERANCE = 1e-4  # of the mean loss of an epoch


def training(args: Namespace) -> Table:
    """Train by each stage. Exits if losses differ from plain torch's."""
    task = {"width": args.width, "rows": args.rows, "epochs": args.epochs}
    rows = ranks(worker.training, 2, timeout=3600, **task)[0]
    for row in rows:
        difference = relative(row["losses"], rows[0]["losses"])
        if not difference <= LOSS_TOLERANCE:
            sys.exit(f"error: {row['run']}: losses differ from plain torch's by {difference:.1e}")
        row |= {"of a parameter": row["states"] / row["parameters"]}
        row |= {"first": row["losses"][0], "last": f"{row['losses'][-1]:.9g}"}
    axes, epochs = ("epoch", "mean loss"), range(1, args.epochs + 1)
    lines = {row["run"]: (epochs, row["losses"]) for row in rows}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    draw(args.output.with_suffix(".png"), "The guide's MLP on random rows, 2 ranks", axes, lines)
    columns = {
        "run": "run",
        "bytes a parameter": "of a parameter",
        "s": "seconds",
        "CPU s": "cpu_seconds",
        "peak MB": ("peak", 1e6),
        "first epoch's loss": "first",
        "last epoch's loss": "last",
    }
    size = rows[0]["parameters"] / 1e6
    return table(f"An MLP of {size:.1f}M parameters in fp32, batch 32; rank 0", columns, rows)


def activations(args: Namespace) -> Table:
    columns = {
        "network": "network",
        "kept": ("without", 1e6),
        "kept with checkpoints": ("with", 1e6),
        "sent to the host": ("offloaded", 1e6),
    }
    caption = "MB that autograd keeps for backward, parameters not counted"
    return table(caption, columns, ranks(worker.activations, 1, timeout=3600)[0])


def meshes(args: Namespace) -> Table:
    """The largest rank of each mesh and stage, with the paper's formula for a part of 1 / (tensor x
    pipeline).
    """
    rows: dict[tuple[int, str], Row] = {}
    for world in args.worlds:
        for of_ranks in zip(*ranks(worker.meshes, world, timeout=3600), strict=True):
            found = max(of_ranks, key=lambda each: each["states"])
            shape = [found[name] for name in ("data", "sequence", "tensor", "pipeline")]
            mesh, part = " x ".join(map(str, shape)), found["elements"] / (shape[2] * shape[3])
            paper = paper_bytes(part, found["stage"], shape[0] * shape[1]) / found["elements"]
            row = rows.setdefault((world, mesh), {"ranks": world, "mesh": mesh})
            row[f"stage {found['stage']}"] = found["states"] / found["elements"]
            row[f"paper {found['stage']}"] = paper
    stages = [f"{word} {stage}" for word in ("stage", "paper") for stage in range(4)]
    columns = {"ranks": "ranks", "data x sequence x tensor x pipeline": "mesh"}
    columns |= {name: name for name in stages}
    caption = "Bytes a parameter of the largest rank: a Llama in bf16 with AdamW"
    return table(caption, columns, rows.values())


def claims(args: Namespace) -> Table:
    from zero.config import load_config
    from zero.tools.estimate.model import build, fill_in
    from zero.tools.estimate.question import Question
    from zero.tools.estimate.rank import estimate

    shape = MODELS["t5-3b"]()
    model, rows = build(shape, torch.bfloat16), []
    for stage, of in [(0, 1), (3, 1), (1, 8), (2, 8), (3, 8), (1, 64), (2, 64), (3, 64)]:
        keys = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage},
        }
        found = estimate(model, fill_in(load_config(keys), shape), Question(of))
        rows.append({"stage": stage, "ranks": of, "paper": paper_bytes(found.elements, stage, of)})
        rows[-1] |= {"less": rows[0]["paper"] / rows[-1]["paper"]}
        rows[-1] |= {"estimate": found.total("device")}
    columns = {"stage": "stage", "ranks": "ranks", "paper GB": ("paper", 1e9)}
    columns |= {"times less": "less", "zero estimate GB": ("estimate", 1e9)}
    caption = "T5-3B in bf16 with AdamW: model states of a rank; the estimate has the buffers too"
    return table(caption, columns, rows)


PARTS = {"training": training, "activations": activations, "meshes": meshes, "claims": claims}


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--width", type=count, default=4000, help="of the MLP's hidden layers")
    add("--rows", type=count, default=10_000)
    add("--epochs", type=count, default=10)
    add("--worlds", type=count, nargs="+", default=[1, 2, 4, 8], help="ranks of the meshes")
    parser.add_output()
    args = parser.parse_args()
    finish(args, *(PARTS[part](args) for part in args.parts))


if __name__ == "__main__":
    main()
