"""Stages 0 to 3 on 1, 2 and 4 processes: model states and the ZeRO paper's formula, memory, time,
loss curves.

    python -m benchmarks.stages

For each number of processes and each stage the table has: the bytes of parameters, gradients and
optimizer state that a rank really holds for a T5 of 42M parameters in bf16, read from the engine's
tensors; the same by formula; peak resident memory; and the time of a step in fp32 as a ratio to
stage 0, measured in turns. Then every stage trains a tiny T5 for a few hundred steps on 2
processes, in fp32 and bf16, and so does plain torch. The losses are drawn. The run fails if a
measured size differs from the formula, or the losses of a stage differ from those of stage 0.

The formula is that of arXiv 1910.02054, section 5, for Adam: 2 bytes per parameter for
16-bit parameters, 2 for 16-bit gradients, 12 for fp32 masters and moments. Each is divided by the
number of ranks starting with the stage that shards it. This engine differs in the gradients: see
`expected_bytes`."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.runner import Parser, Row, Table, draw, finish, ranks, relative, table
from benchmarks.stages.worker import ACCUMULATION, MODELS, STAGES, cost, train
from zero.tools.arguments import above_zero, count

OPTIMIZER_BYTES = 12
# Largest relative difference between a measured size and the formula: groups are padded.
SIZE_TOLERANCE = 1e-3
# Largest relative difference of a loss to that of stage 0 in fp32: only the order of sums differs.
LOSS_TOLERANCE = 1e-4
STATES = ("parameters", "gradients", "optimizer")
PLAIN = "plain torch, fp32"
COLUMNS = {
    **{name: name for name in ("ranks", "stage", *STATES, "sum", "formula", "paper")},
    "accumulated": "accumulated",
    "peak MB": ("peak", 1e6),
    "CPU s": "cpu",
    "CPU / stage 0": "cpu ratio",
    "wall / stage 0": "seconds ratio",
}


def paper_bytes(parameters: float, stage: int, ranks: int) -> float:
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


def rows_of(found: list[dict[str, Any]]) -> list[Row]:
    """Return one row for each stage: bytes a parameter of the largest rank, and median seconds over
    ranks, rounds and steps.

    A ratio to stage 0 is formed within a round. The median over the rounds is taken.
    """
    parameters, rows, rounds = found[0]["parameters"], [], range(len(found[0]["rounds"]))

    def median(kind: str, number: int, stage: int) -> float:
        return statistics.median(rank["rounds"][number][stage][kind] for rank in found)

    for stage in STAGES:
        paper = paper_bytes(parameters, stage, len(found))
        expected = expected_bytes(parameters, stage, len(found))
        measured = {name: max(rank["memory"][stage][name] for rank in found) for name in expected}
        for name, nbytes in expected.items():
            if abs(measured[name] - nbytes) > SIZE_TOLERANCE * paper:
                sys.exit(
                    f"error: stage {stage} on {len(found)} ranks holds {measured[name]} bytes of "
                    f"{name}, not {nbytes:.0f}"
                )
        sizes = measured | {"paper": paper, "sum": sum(measured[name] for name in STATES)}
        sizes["formula"] = sum(expected[name] for name in STATES)
        row: Row = {"ranks": len(found), "stage": stage}
        row |= {name: nbytes / parameters for name, nbytes in sizes.items()}
        row["peak"] = max(rank["memory"][stage]["peak"] for rank in found)
        for kind in ("seconds", "cpu"):
            row[kind] = statistics.median(median(kind, number, stage) for number in rounds)
            row[f"{kind} ratio"] = statistics.median(
                median(kind, number, stage) / median(kind, number, 0) for number in rounds
            )
        rows.append(row)
    for rank, result in enumerate(found):
        for stages in result["rounds"]:
            for stage, measured in enumerate(stages):
                difference = relative(measured["losses"], stages[0]["losses"])
                if not difference <= LOSS_TOLERANCE:
                    sys.exit(
                        f"error: stage {stage} on rank {rank}: losses differ from stage 0's by "
                        f"{difference:.1e}"
                    )
    return rows


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--model", choices=MODELS, default=MODELS[0])
    add("--world-sizes", nargs="+", type=count, default=[1, 2, 4])
    add("--batch", type=count, default=4, help="sentences per process and step")
    add("--length", type=count, default=16, help="tokens of each source and of each target")
    add("--rounds", type=count, default=3)
    add("--steps", type=count, default=3, help="counted steps, per round")
    add("--train-steps", type=count, default=300, help="steps of the short training")
    add("--learning-rate", type=above_zero, default=3e-3, help="of the short training")
    parser.add_output()
    args = parser.parse_args()
    curves = ranks(train, 2, steps=args.train_steps, lr=args.learning_rate)[0]
    losses = [
        [name, losses[0], losses[-1], relative(losses, curves[PLAIN])]
        for name, losses in curves.items()
    ]
    columns = ["short training", "first loss", "last", "largest difference to plain torch"]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    lines = {name: (range(len(losses)), losses) for name, losses in curves.items()}
    draw(args.output.with_suffix(".png"), "A tiny T5 on 2 ranks", ("step", "loss"), lines)
    rows, names = [], ("model", "batch", "length", "rounds", "steps")
    task = {name: getattr(args, name) for name in names}
    for size in args.world_sizes:
        rows += rows_of(ranks(cost, size, **task))
    caption = (
        f"{args.model}. Model states of a rank, bytes a parameter, bf16, accumulation "
        f"{ACCUMULATION}; seconds of a step of {args.batch} x ({args.length} + {args.length}) "
        "tokens a process, fp32"
    )
    tables = Table("A tiny T5 on 2 ranks: loss", columns, losses), table(caption, COLUMNS, rows)
    finish(args, *tables, rows=rows, curves=curves)


if __name__ == "__main__":
    main()
