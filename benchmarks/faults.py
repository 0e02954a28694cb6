"""What an enemy would try: kills at random file operations, damaged files, mutated configurations.

    python -m benchmarks.faults --trials 500 --seed 1
    python -m benchmarks.faults --trials 20 --seed 1 --parts kills damage

kills    real Trainer runs, killed by SIGKILL at random file operations and started again by the same command, until
         they come to their end: every loss and every weight must be that of a run that nobody killed
damage   every file of a checkpoint flipped, cut and removed: refused by name, passed over, or without any effect
config   mutated configurations: no hang, no raw traceback, no typo accepted

A part is a module `benchmarks.faults_PART` with a function `run(trials, chance, folder)` that returns a `Report`. The
exit code is 1 if anything failed; each failure names what it takes to see it again.
"""

from __future__ import annotations

import argparse
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

PARTS = ("kills", "damage", "config")


@dataclass
class Report:
    """How many trials ended in which way, and a text for each that should not have ended so."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500, help="kills; of other parts, in proportion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    failed = False
    for part in args.parts:
        if importlib.util.find_spec(f"benchmarks.faults_{part}") is None:
            print(f"{part}: there is no such part yet")
            continue
        module, start = importlib.import_module(f"benchmarks.faults_{part}"), time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="zero-faults-"))  # a TemporaryDirectory would end with the first fork
        try:
            report = module.run(args.trials, random.Random(f"{args.seed} {part}"), folder)
        finally:
            shutil.rmtree(folder)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items()))
        print(f"{part}: {outcomes}; {len(report.failures)} failed ({time.monotonic() - start:.0f} s)", flush=True)
        print(*(f"  {failure}" for failure in report.failures), sep="\n", end="\n" if report.failures else "")
        failed |= bool(report.failures)
    sys.exit(failed)


if __name__ == "__main__":
    main()
