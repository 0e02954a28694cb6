"""Measures what the monitors cost: the seconds of each step that they take, and those of the step.

    python -m benchmarks.monitor
    python -m benchmarks.monitor --sections json_monitor --models t5-10m --steps 200

Two gloo ranks train a T5 at stage 3. The benchmark measures what the monitor does after a step.
Before that, all ranks wait for each other, so that waiting for a slower rank is not counted.
`cpu ms`: of all threads. The median of the slowest rank counts."""

from __future__ import annotations

import statistics
import tempfile
from itertools import product
from typing import Any

import torch.distributed as dist

from benchmarks.measuring import timed
from benchmarks.models import build, synthetic_batches
from benchmarks.runner import Parser, Row, finish, ranks, table
from benchmarks.step.worker import by_engine
from zero.tools.arguments import count

WARM_UP, BATCH, LENGTH = 4, 8, 32
SECTIONS = ("json_monitor", "csv_monitor")
COLUMNS = {
    "model": "model",
    "section": "section",
    "step ms": ("step", 1e-3),
    "wall ms": ("seconds", 1e-3),
    "of step, %": "share",
    "cpu ms": ("cpu", 1e-3),
}


class TimedMonitor:
    """The engine's monitor, with the costs of its last `end_step`."""

    def __init__(self, monitor: Any):
        self._monitor = monitor
        self.loss = monitor.loss
        self.costs: dict[str, float] = {}

    def end_step(self) -> None:
        self.costs, _ = timed(self._monitor.end_step)


def measure(model: str, section: str, steps: int, folder: str) -> dict[str, float]:
    """On a rank: the medians of a step, and of what the monitor does after it."""
    import zero

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        section: {"enabled": True, "output_path": folder},
    }
    built = build(model)
    vocabulary = built.config.vocab_size
    engine = zero.initialize(model=built, config=config)[0]
    batches = synthetic_batches(vocabulary, BATCH, LENGTH, LENGTH, seed=dist.get_rank())
    engine.monitor = monitor = TimedMonitor(engine.monitor)
    step, found = by_engine(engine), []
    for _ in range(WARM_UP + steps):
        costs, _ = timed(lambda: step(next(batches)))
        found.append({"step": costs["seconds"], **monitor.costs})
    return {key: statistics.median(row[key] for row in found[WARM_UP:]) for key in found[-1]}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    models = ["t5-10m", "t5-42m"]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--steps", type=count, default=40, help="steps after 4 that do not count")
    parser.add_output()
    args = parser.parse_args()
    rows: list[Row] = []
    for model, section in product(args.models, args.sections):
        with tempfile.TemporaryDirectory() as folder:
            task = {"model": model, "section": section, "steps": args.steps, "folder": folder}
            found = ranks(measure, 2, timeout=1200, **task)
        row = {key: max(rank[key] for rank in found) for key in found[0]}
        share = {"share": 100 * row["seconds"] / row["step"]}
        rows.append({"model": model, "section": section} | row | share)
    finish(args, table("What a monitor takes of a step", COLUMNS, rows), rows=rows)


if __name__ == "__main__":
    main()
