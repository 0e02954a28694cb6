"""Measures a training step with several optimizers: this engine, FSDP2 and DeepSpeed.

    python -m benchmarks.optimizers
    python -m benchmarks.optimizers --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED

All systems train the same Llama (7.4M parameters) in fp32 on the same global batches, at stages 2
and 3 on 2 and 4 processes of one thread. They take turns, so that a busy machine disturbs all of
them alike. The table has CPU seconds of a step (forward, backward and update; all threads of a
process; the median over steps, the mean over processes), wall seconds, bytes of optimizer state per
parameter on the largest process, and the largest relative difference of a loss from plain torch in
one process. Anything that a system cannot do, and missing packages, are named below the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.arguments import Parser, interpreter, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from benchmarks.optimizers.worker import OPTIMIZERS
from zero.tools.arguments import above_zero, count

SYSTEMS = ["ours", "fsdp2", "deepspeed"]
PACKAGES = {"AdamW 8-bit (torchao)": "torchao", "AdamW 8-bit (bitsandbytes)": "bitsandbytes"}
ROWS_OF_A_RANK = 4
# Our largest relative difference of a loss to plain torch's: sums have another order, Muon
# multiplies in bf16, and an element of 8-bit state may get the neighbouring code.
LOSS_TOLERANCE = 1e-3

Row = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--deepspeed-python",
        type=interpreter,
        help="interpreter of an environment that has deepspeed",
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--stages", nargs="+", type=int, choices=[2, 3], default=[2, 3])
    parser.add_argument("--processes", nargs="+", type=count, default=[2, 4])
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count, per round")
    parser.add_argument("--steps", type=count, default=4, help="counted steps, per round")
    parser.add_argument("--timeout", type=above_zero, default=1200, help="seconds of one job")
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "optimizers.json"
    )
    args = parser.parse_args()
    if args.deepspeed_python is None and "deepspeed" in args.systems:
        print("left out: deepspeed (no --deepspeed-python)", file=sys.stderr)
        args.systems = [name for name in args.systems if name != "deepspeed"]
    return args


def installed(python: str, optimizers: list[str], where: str) -> list[str]:
    """Those of `optimizers` whose package the interpreter `python` has; prints the others."""
    found = []
    for name in optimizers:
        package = PACKAGES.get(name)
        probe = (
            f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
        )
        if package is None or subprocess.run([python, "-c", probe]).returncode == 0:
            found.append(name)
        else:
            print(f"left out in {where}: {name} ({package} is not installed)", file=sys.stderr)
    return found


def run(
    system: str, python: str, optimizers: list[str], ranks: int, rows: int, args: argparse.Namespace
) -> list[Row]:
    """Run all cases of one system on so many ranks.

    A row for each: what each rank found, or the error.
    """
    stages = [2] if system == "plain" else args.stages
    options = {"system": [system], "optimizers": optimizers, "stages": stages, "rows": [rows]}
    options |= {"warmup": [args.warmup], "steps": [args.steps]}
    command = ["-m", "benchmarks.optimizers.worker"]
    for key, values in options.items():
        command += [f"--{key}", *map(str, values)]
    env = {"DS_ACCELERATOR": "cpu"} if system == "deepspeed" else None
    cases = [(name, stage) for name in optimizers for stage in stages]
    try:
        reports = run_ranks(python, command, ranks, args.timeout, env)
        found = [
            _merged([report[f"{name}, {stage}"] for report in reports]) for name, stage in cases
        ]
    except (
        RuntimeError
    ) as error:  # a crash or a hang ends all cases of the job; other systems go on
        found = [{"error": str(error).splitlines()[0]}] * len(cases)
    return [
        {"system": system, "optimizer": name, "stage": stage, "processes": rows // ROWS_OF_A_RANK}
        | row
        for (name, stage), row in zip(cases, found, strict=True)
    ]


def _merged(ranks: list[Row]) -> Row:
    """One row of what all ranks found: times of a process, losses of the global batches."""
    for rank in ranks:
        if "error" in rank:
            return {"error": rank["error"]}
    losses = [
        statistics.mean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)
    ]
    times = {
        key: statistics.mean(statistics.median(rank[key]) for rank in ranks)
        for key in ("cpu", "wall")
    }
    return times | {
        "state": max(rank["state"] / rank["parameters"] for rank in ranks),
        "losses": losses,
    }


def measured(args: argparse.Namespace) -> list[Row]:
    """The rows of all rounds, plain torch's included.

    After each job the table so far is written to the output.
    """
    pythons = {"plain": sys.executable, "ours": sys.executable, "fsdp2": sys.executable}
    pythons["deepspeed"] = args.deepspeed_python
    names = {sys.executable: installed(sys.executable, args.optimizers, "this environment")}
    if "deepspeed" in args.systems:
        python = args.deepspeed_python
        names[python] = installed(python, names[sys.executable], "DeepSpeed's environment")
    found = []
    for number in range(args.rounds):
        for ranks in args.processes:
            for system in ["plain", *args.systems] if number == 0 else args.systems:
                python, rows = pythons[system], ranks * ROWS_OF_A_RANK
                found += run(
                    system, python, names[python], 1 if system == "plain" else ranks, rows, args
                )
                print(
                    f"round {number + 1}: {system}, {ranks} ranks; load {os.getloadavg()[0]:.1f}",
                    file=sys.stderr,
                )
                save(args, found)
    return found


def save(args: argparse.Namespace, found: list[Row]) -> None:
    settings = {
        key: value for key, value in vars(args).items() if key not in ("output", "deepspeed_python")
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"settings": settings, "rows": summarize(found, args.systems), "jobs": found}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


def summarize(found: list[Row], systems: list[str]) -> list[Row]:
    """A row for each case: medians over the rounds, ratios to ours, and the difference of losses to
    plain torch's.
    """
    keys = ("optimizer", "processes", "stage")
    plain = {(row["optimizer"], row["processes"]): row for row in found if row["system"] == "plain"}
    rows: list[Row] = []
    for case in sorted(
        {tuple(row[key] for key in keys) for row in found if row["system"] != "plain"}
    ):
        own: Row = {}
        for system in systems:
            rounds = [
                r for r in found if r["system"] == system and tuple(r[key] for key in keys) == case
            ]
            if rounds:
                row = dict(zip(keys, case, strict=True)) | {"system": system}
                rows.append(row | _over_rounds(rounds, plain[case[:2]], own))
                own = rows[-1] if system == "ours" else own
    return rows


def _over_rounds(rounds: list[Row], plain: Row, own: Row) -> Row:
    """Medians of one case, or its error. Args: own: our row of the same case, empty for ours."""
    for row in [*rounds, plain]:
        if "error" in row:
            return {"error": row["error"]}
    found = {key: statistics.median(row[key] for row in rounds) for key in ("cpu", "wall", "state")}
    pairs = [pair for row in rounds for pair in zip(row["losses"], plain["losses"], strict=True)]
    found["apart"] = max(abs(loss / expected - 1) for loss, expected in pairs)
    if "cpu" in own:
        found |= {f"{key} to ours": found[key] / own[key] for key in ("cpu", "wall")}
    return found


def show(rows: list[Row]) -> None:
    print(
        "| optimizer | processes | stage | system | CPU s | CPU / ours | wall s | state, "
        "bytes/parameter | losses |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        case = f"| {row['optimizer']} | {row['processes']} | {row['stage']} | {row['system']} |"
        if "error" in row:
            print(f"{case} fails | | | | |")
            continue
        ratio = f"{row['cpu to ours']:.2f}" if "cpu to ours" in row else ""
        print(
            f"{case} {row['cpu']:.3f} | {ratio} | {row['wall']:.2f} | {row['state']:.2f} | "
            f"{row['apart']:.0e} |"
        )
    for row in rows:
        if "error" in row:
            place = (
                f"{row['system']}, {row['optimizer']}, stage {row['stage']}, "
                f"{row['processes']} processes"
            )
            print(f"fails: {place}: {row['error']}")


def main() -> None:
    args = parse_arguments()
    rows = summarize(measured(args), args.systems)
    show(rows)
    for row in rows:
        if row["system"] == "ours" and ("error" in row or row["apart"] > LOSS_TOLERANCE):
            sys.exit(f"error: ours does not train as plain torch does: {row}")


if __name__ == "__main__":
    main()
