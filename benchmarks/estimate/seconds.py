"""Compares the seconds of a step that `zero estimate` predicts with measured ones: on an H100 (with
memory), and on this machine.

    python -m benchmarks.estimate.seconds
    python -m benchmarks.estimate.seconds --only h100

The runs on the H100 were measured once (`docs/results.md`). They are predicted with the speeds that
its maker states, and with assumptions about its host. On this machine, `zero doctor --speeds`
measures the speeds, and then the variants of `benchmarks.offload` run one after another, each in
its own process. The median step of the fastest round counts, because other jobs may use the cores.
The run fails if a prediction is off by a factor of more than 1.5 on the H100, or of more than 1.3
here."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.models import MODELS
from benchmarks.offload.__main__ import DEFAULT
from benchmarks.runner import Parser, Row, finish, run_job, table, take_turns
from benchmarks.step.comparison import add_options, run
from benchmarks.step.worker import section_of
from zero.config import load_config
from zero.tools.estimate.machine import DEVICE, HOST
from zero.tools.estimate.model import build
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import Estimate, estimate
from zero.tools.estimate.speeds import Speeds, of_device, read

CPU = {"device": "cpu"}
OPTIMIZER = {"stage": 3, "offload_optimizer": CPU}
BOTH = OPTIMIZER | {"offload_param": CPU}
CODED = {"zero_quantized_moments": True}
FACTORS = {"h100": 1.5, "here": 1.3}


class Run(NamedTuple):
    """A run that was measured: on one process, in bf16, with fp32 masters. Memory is in GB (1e9
    bytes), in host memory with the Python process.
    """

    name: str
    section: dict[str, Any]
    batch: int
    length: int
    checkpointing: bool
    seconds: float
    device: float
    host: float | None = None
    slices: int = 1

    def __hash__(self) -> int:  # it has dicts
        return hash(self.name)

    def predicted(self, speeds: Speeds) -> Estimate:
        shape = MODELS[self.name.partition(",")[0].lower().replace(" ", "-")]()
        config = {"bf16": {"enabled": True}, "zero_optimization": self.section}
        config["activation_checkpointing"] = {"batch_slices": self.slices}
        question = Question(1, self.batch, self.length, self.checkpointing, speeds)
        return estimate(build(shape, torch.bfloat16), load_config(config), question)


ON_H100 = (
    Run("Llama 1B, stage 1", {"stage": 1}, 4, 2048, False, 0.207, 44.4),
    Run("Llama 1B, stage 3", {"stage": 3}, 4, 2048, False, 0.198, 44.4),
    Run("Llama 1B, all in host memory", BOTH, 4, 2048, False, 0.445, 28.2, 21.0),
    Run("Llama 1B, optimizer in host memory", OPTIMIZER, 4, 2048, False, 0.579, 29.5, 19.5),
    Run("T5-3B, all in host memory", BOTH, 8, 512, False, 1.036, 41.0, 47.2),
    Run("T5-3B, the same, 8-bit moments", BOTH | CODED, 8, 512, False, 1.303, 41.0, 30.2),
    Run("Llama 8B, in host memory, 8-bit moments", BOTH | CODED, 4, 2048, True, 3.10, 16.1, 82.0),
    Run("Llama 8B 32k, the same, in 8 slices", BOTH | CODED, 32, 2048, False, 9.48, 45.7, 74.3, 8),
)


def on_h100() -> list[dict[str, Any]]:
    speeds, rows = of_device("h100"), []
    for each in ON_H100:
        found = each.predicted(speeds)
        row = {"machine": "h100", "run": each.name}
        row |= {"predicted": found.seconds, "measured": each.seconds}
        for place, measured in ((DEVICE, each.device), (HOST, each.host)):
            if measured is not None:
                row[place] = f"{found.total(place) / 1e9:.1f} / {measured:.1f}"
        rows.append(row)
    return rows


def here(args: argparse.Namespace) -> list[Row]:
    """The variants of `benchmarks.offload` on this machine."""
    env = {"OMP_NUM_THREADS": str(args.threads)}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        file = Path(folder, "speeds.json")
        options = ["--folder", folder, "--speeds", str(file)]
        run_job(sys.executable, ["-m", "zero", "doctor", *options], args.ranks, 300, env)
        speeds = read(file)
    print(speeds, file=sys.stderr)
    rounds, missing = take_turns(args.variants, args.rounds, lambda variant: run(variant, args))
    if missing:
        sys.exit(f"error: {missing}")
    rows = []
    for variant in args.variants:
        # Not the fastest step: updates that overlap with the next one make some steps short.
        taken = min(found[variant]["seconds"] for found in rounds)
        found = predicted(variant, speeds, args)
        row = {"machine": "here", "run": variant, "predicted": found.seconds, "measured": taken}
        rows.append(row | {"parts": found.traffic.parts(speeds, 4)})
    return rows


def predicted(variant: str, speeds: Speeds, args: argparse.Namespace) -> Estimate:
    """The estimate of a variant, with the configuration that the worker has."""
    section = section_of(variant, "/tmp")
    config = load_config({"gradient_clipping": 1.0, "zero_optimization": section})
    question = Question(args.ranks, 1, args.length, False, speeds)
    return estimate(build(MODELS[args.model](), torch.float32), config, question)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=FACTORS, help="one of the machines")
    ours = [name for name in DEFAULT if name.startswith("zero")]
    parser.add_argument("--variants", nargs="+", choices=ours, default=ours)
    add_options(
        parser, model="t5-small", ranks=1, threads=1, batch=1, length=128, rounds=3, warmup=2,
        steps=6,
    )  # fmt: skip
    args = parser.parse_args()
    args.dtype = "fp32"
    rows = [] if args.only == "here" else on_h100()
    rows += [] if args.only == "h100" else here(args)
    wrong = []
    for row in rows:
        row["ratio"], factor = row["predicted"] / row["measured"], FACTORS[row["machine"]]
        if not 1 / factor <= row["ratio"] <= factor:
            wrong.append(row["run"])
    columns = ("machine", "run", "predicted", "measured", "ratio", DEVICE, HOST)
    caption = "Seconds of a step, and predicted / measured GB where they were measured"
    finish(args, table(caption, {name: name for name in columns}, rows), rows=rows)
    if wrong:
        sys.exit(f"error: too far off: {'; '.join(wrong)}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
