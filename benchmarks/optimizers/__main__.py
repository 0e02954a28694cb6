"""Measures a training step with several optimizers: this engine, FSDP2 and DeepSpeed.

    python -m benchmarks.optimizers
    python -m benchmarks.optimizers --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED

All systems train the same Llama (7.4M parameters) in fp32 on the same global batches, at stages 2
and 3 on 2 and 4 processes of one thread. They take turns, so that a busy machine disturbs all of
them alike. The table has CPU seconds of a step (forward, backward and update; all threads of a
process; the median over steps, the mean over processes), wall seconds, bytes of optimizer state per
parameter on the largest process, and the largest relative difference of a loss from plain torch in
one process. What a system cannot do, and missing packages, are named in the table. The run fails if
this engine does not train as plain torch does.
"""

from __future__ import annotations

import os
import statistics
import sys
from argparse import Namespace
from itertools import product

from benchmarks.optimizers.worker import OPTIMIZERS, run_all
from benchmarks.runner import (
    Parser,
    Row,
    cause,
    environment,
    finish,
    medians,
    ranks,
    relative,
    table,
)
from zero.tools.arguments import above_zero, count

SYSTEMS = ["ours", "fsdp2", "deepspeed"]
ROWS_OF_A_RANK = 4
# Our largest relative difference of a loss to plain torch's: sums have another order, Muon
# multiplies in bf16, and an element of 8-bit state may get the neighbouring code.
LOSS_TOLERANCE = 1e-3
COLUMNS = {
    **{name: name for name in ("optimizer", "processes", "stage", "system")},
    "CPU s": "cpu",
    "CPU / ours": "cpu ratio",
    "wall s": "seconds",
    "state, bytes/parameter": "state",
    "losses": "apart",
    "fails": "error",
}


def run(system: str, number: int, args: Namespace) -> dict[tuple, Row]:
    """Run all cases of one system on so many ranks. Returns a row for each optimizer and stage:
    what the ranks found, or the error.
    """
    stages = [2] if system == "plain" else args.stages
    task = {"optimizers": args.optimizers, "stages": stages, "rows": number * ROWS_OF_A_RANK}
    task |= {"warmup": args.warmup, "steps": args.steps}
    cases, nproc = list(product(args.optimizers, stages)), 1 if system == "plain" else number
    env = environment(system, args)
    try:
        found = ranks(run_all, nproc, timeout=args.timeout, system=system, **env, **task)
    except RuntimeError as error:  # it ends all cases of the job; other systems go on
        return {case: {"error": cause(str(error))} for case in cases}
    print(f"{system}, {number} ranks; load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return {
        case: merged(list(of_ranks))
        for case, of_ranks in zip(cases, zip(*found, strict=True), strict=True)
    }


def merged(found: list[Row]) -> Row:
    """Return one row of what all ranks found: times of a process, losses of the global batches."""
    for rank in found:
        if "error" in rank:
            return {"error": rank["error"]}
    losses = [statistics.mean(step) for step in zip(*(r["losses"] for r in found), strict=True)]
    row = {key: statistics.mean(rank[key] for rank in found) for key in ("cpu", "seconds")}
    return row | {"state": max(rank["state"] for rank in found), "losses": losses}


def over_rounds(rounds: list[Row], plain: Row) -> Row:
    """Return medians of one case, or its error."""
    for row in [*rounds, plain]:
        if "error" in row:
            return {"error": row["error"]}
    differences = [relative(row["losses"], plain["losses"]) for row in rounds]
    return medians(rounds) | {"apart": max(differences)}


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    add("--stages", nargs="+", type=int, choices=[2, 3], default=[2, 3])
    add("--processes", nargs="+", type=count, default=[2, 4])
    add("--rounds", type=count, default=2)
    add("--warmup", type=int, default=2, help="steps that do not count, per round")
    add("--steps", type=count, default=4, help="counted steps, per round")
    add("--timeout", type=above_zero, default=1200, help="seconds of one job")
    parser.add_deepspeed()
    parser.add_output()
    args = parser.parse_args()
    systems = [name for name in args.systems if args.deepspeed_python or name != "deepspeed"]
    plain = {number: run("plain", number, args) for number in args.processes}
    rounds = [
        {(number, name): run(name, number, args) for number in args.processes for name in systems}
        for _ in range(args.rounds)
    ]
    rows, wrong = [], []
    for name, number, stage in product(args.optimizers, args.processes, args.stages):
        ours: Row = {}
        for system in systems:
            jobs = [found[number, system][name, stage] for found in rounds]
            row = over_rounds(jobs, plain[number][name, 2])
            case = {"optimizer": name, "processes": number, "stage": stage, "system": system}
            ours = row if system == "ours" else ours
            if "cpu" in ours and "cpu" in row:
                row["cpu ratio"] = row["cpu"] / ours["cpu"]
            rows.append(case | row)
            # A package that is missing is not a difference.
            missing = "ModuleNotFoundError" in row.get("error", "")
            if system == "ours" and not missing and not row.get("apart", 1.0) <= LOSS_TOLERANCE:
                wrong.append(f"{name}, {number} processes, stage {stage}")
    finish(args, table("A step and process, fp32", COLUMNS, rows), rows=rows)
    if wrong:
        sys.exit(f"error: ours does not train as plain torch does: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
