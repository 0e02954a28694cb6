"""The comparisons of trainings that `benchmarks.step`, `benchmarks.gpu` and `benchmarks.offload`
make: options, jobs and tables.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from benchmarks.models import MODELS
from benchmarks.runner import Parser, Row, Table, environment, existing_folder, ranks
from benchmarks.step.worker import VARIANTS, train
from zero.tools.arguments import count


def add_options(parser: Parser, **defaults: Any) -> None:
    """Add the options of every job, with these defaults."""
    add = parser.add_argument
    add("--model", choices=list(MODELS), default=defaults["model"])
    add("--ranks", type=count, default=defaults["ranks"], help="one for each GPU, if there are any")
    add(
        "--threads",
        type=count,
        default=defaults.get("threads"),
        help="compute threads of a process; default: its part of the cores",
    )
    add("--batch", type=count, default=defaults["batch"], help="sequences per process and step")
    add("--length", type=count, default=defaults["length"], help="tokens of each sequence")
    add("--checkpointing", action="store_true", help="recompute the activations of each block")
    add("--rounds", type=count, default=defaults["rounds"])
    add("--warmup", type=count, default=defaults["warmup"], help="steps that do not count")
    add("--steps", type=count, default=defaults["steps"], help="steps that count, per round")
    add("--folder", type=existing_folder, help="for the offload files; default: temporary")
    parser.add_deepspeed()
    parser.add_output()


def choose(args: Namespace, default: Iterable[str]) -> None:
    """Set `args.variants`, without those that need an interpreter that was not given."""
    args.variants = list(dict.fromkeys(args.variants or default))
    args.threads = args.threads or max(1, (os.cpu_count() or 1) // args.ranks)
    own = [name for name in args.variants if not name.startswith("deepspeed")]
    if not args.deepspeed_python and own != args.variants:
        args.variants = own
        print("left out: deepspeed (no --deepspeed-python)", file=sys.stderr)


def run(variant: str, args: Namespace, timeout: float = 3600, **changed: Any) -> Row:
    """Run one job. Return the slowest rank's seconds, the largest memory, the means of losses over
    the ranks, and what rank 0 reports beside.

    changed: of the worker's settings, other than the options have them.
    """
    task: Row = {"one_batch": False, "micro_batches": 1, "slices": 1, "live": 0, "keys": {}}
    names = ("model", "dtype", "batch", "length", "warmup", "steps", "checkpointing")
    task |= {name: getattr(args, name) for name in names} | changed
    env = environment(variant, args)
    env["env"] = {**env.get("env", {}), "OMP_NUM_THREADS": str(args.threads)}
    nproc = 1 if VARIANTS[variant].system == "plain" else args.ranks
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = ranks(train, nproc, timeout=timeout, variant=variant, folder=folder, **env, **task)
    largest = ("seconds", "cpu", "issued", "steady", "host", "device", "reserved", "first")
    row = {key: max(each[key] for each in found) for key in largest if key in found[0]}
    losses = [statistics.mean(step) for step in zip(*(r["losses"] for r in found), strict=True)]
    return {**found[0], **row, "losses": losses}


def heading(args: Namespace, row: Row) -> str:
    return (
        f"{args.model}, {row['parameters'] / 1e6:.1f}M parameters, {args.dtype}, "
        f"{args.batch} x {args.length} tokens, {args.ranks} rank(s) of {args.threads} thread(s), "
        f"{row['name']}"
    )


def phases(rows: dict[str, Row]) -> Table:
    """Return seconds of a step by phase, as the host sees them, with the waits in it."""
    lines = []
    for variant, row in rows.items():
        for phase, spent in row.get("phases", {}).items():
            waits = [
                f"{name.split(': ')[1]} {seconds:.3f}"
                for name, seconds in row["waits"].items()
                if name.startswith(phase)
            ]
            lines.append([variant, phase, spent, ", ".join(waits)])
    return Table("Seconds of a step by phase", ["variant", "phase", "s", "waits"], lines)
