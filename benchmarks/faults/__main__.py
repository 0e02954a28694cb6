"""Faults on purpose: kills at random file operations, damaged files, mutated configurations.

    python -m benchmarks.faults --trials 500 --seed 1
    python -m benchmarks.faults --trials 20 --seed 1 --parts kills damage

kills    Real Trainer runs are killed by SIGKILL at random file operations, and started again by
         the same command until they finish. Every loss and every weight must equal those of an
         uninterrupted run.
damage   Bytes of every file of a checkpoint are flipped, and the file is cut and removed. It must
         be refused by name or skipped, or the damage must have no effect.
config   Mutated configurations: no hang, no raw traceback, no accepted typo.

A part is a module `benchmarks.faults.PART` with a function `run(trials, chance, folder)` that
returns a `Report`. The exit code is 1 if anything failed. Each failure says how to reproduce it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.runner import Parser
from zero.tools.arguments import count

PARTS = ("kills", "damage", "config")


@dataclass
class Report:
    """The number of trials for each outcome, and a text for each failure."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--trials",
        type=count,
        default=500,
        help="number of kills; other parts have a number in proportion",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    failed = False
    for part in args.parts:
        if importlib.util.find_spec(f"benchmarks.faults.{part}") is None:
            print(f"{part}: there is no such part yet")
            continue
        module, start = importlib.import_module(f"benchmarks.faults.{part}"), time.monotonic()
        folder = Path(
            tempfile.mkdtemp(prefix="zero-faults-")
        )  # the first fork that ends would remove a TemporaryDirectory
        try:
            report = module.run(args.trials, random.Random(f"{args.seed} {part}"), folder)
        finally:
            shutil.rmtree(folder)
        outcomes = ", ".join(
            f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items())
        )
        print(
            f"{part}: {outcomes}; {len(report.failures)} failed ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
        print(
            *(f"  {failure}" for failure in report.failures),
            sep="\n",
            end="\n" if report.failures else "",
        )
        failed |= bool(report.failures)
    sys.exit(failed)


if __name__ == "__main__":
    main()
