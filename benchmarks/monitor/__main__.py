"""Measures what the monitors cost: the seconds of each step that they take, and those of the step.

    python -m benchmarks.monitor
    python -m benchmarks.monitor --sections json_monitor --models small --steps 200

Two gloo ranks train a T5 at stage 3. The benchmark measures what the monitor does after a step.
Before that, all ranks wait for each other, so that waiting for a slower rank is not counted.
`cpu ms`: of all threads. The median of the slowest rank counts."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from typing import Any

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from benchmarks.monitor.worker import MODELS, SECTIONS
from zero.tools.arguments import count


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=count, default=40, help="steps after 4 that do not count")
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "monitor.json"
    )
    return parser.parse_args()


def measure(model: str, section: str, steps: int) -> dict[str, Any]:
    options = ["--model", model, "--section", section, "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(
            sys.executable,
            ["-m", "benchmarks.monitor.worker", *options, "--folder", folder],
            2,
            1200,
        )
    found = {
        name: max(statistics.median(rank[name]) for rank in ranks)
        for name in ("step", "wall", "cpu")
    }
    return {"model": model, "section": section} | found


def main() -> None:
    args = parse_arguments()
    rows = [
        measure(model, section, args.steps) for model in args.models for section in args.sections
    ]
    print(f"{'model':<8}{'section':<14}{'step ms':>9}{'wall ms':>9}{'of step':>9}{'cpu ms':>9}")
    for row in rows:
        numbers = "".join(f"{1000 * row[name]:9.2f}" for name in ("step", "wall"))
        share = f"{row['wall'] / row['step']:9.2%}{1000 * row['cpu']:9.2f}"
        print(f"{row['model']:<8}{row['section']:<14}{numbers}{share}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
