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
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from benchmarks.arguments import Parser
from benchmarks.launch import REPOSITORY, run_job, run_ranks
from benchmarks.models import t5_config
from benchmarks.offload.worker import MODELS, VARIANTS
from benchmarks.scaling.timeline import shape_of
from zero.config import load_config
from zero.tools.arguments import count
from zero.tools.estimate.machine import DEVICE, HOST
from zero.tools.estimate.model import build
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import Estimate, estimate
from zero.tools.estimate.speeds import Speeds, chosen, read

CPU = {"device": "cpu"}
BOTH = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
CODED = {"zero_quantized_moments": True}
FACTORS = {"h100": 1.5, "here": 1.3}


def llama_1b() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )


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

    def __hash__(self) -> int:  # it has dicts
        return hash(self.name)

    def predicted(self, speeds: Speeds) -> Estimate:
        shape = llama_1b() if self.name.startswith("Llama 1B") else shape_of(SHAPES[self.name[:5]])
        config = load_config({"bf16": {"enabled": True}, "zero_optimization": self.section})
        question = Question(1, self.batch, self.length, self.checkpointing, speeds)
        return estimate(build(shape, torch.bfloat16), config, question)


SHAPES = {"T5-3B": "t5-3b", "Llama": "llama-8b"}
ON_H100 = (
    Run("Llama 1B, stage 1", {"stage": 1}, 4, 2048, False, 0.207, 44.4),
    Run("Llama 1B, stage 3", {"stage": 3}, 4, 2048, False, 0.198, 44.4),
    Run("Llama 1B, all in host memory", BOTH, 4, 2048, False, 0.534, 28.2, 21.2),
    Run(
        "Llama 1B, optimizer in host memory",
        {"stage": 3, "offload_optimizer": CPU},
        4,
        2048,
        False,
        0.579,
        29.5,
        19.5,
    ),
    Run("T5-3B, all in host memory", BOTH, 8, 512, False, 1.036, 41.0, 47.2),
    Run("T5-3B, the same, 8-bit moments", BOTH | CODED, 8, 512, False, 1.303, 41.0, 30.2),
    Run(
        "Llama 8B, all in host memory, 8-bit moments", BOTH | CODED, 4, 2048, True, 3.10, 16.1, 82.0
    ),
)


def on_h100() -> list[dict[str, Any]]:
    speeds, rows = chosen("h100"), []
    for run in ON_H100:
        found = run.predicted(speeds)
        row = {"machine": "h100", "run": run.name}
        row |= {"predicted": found.seconds, "measured": run.seconds}
        for place, measured in ((DEVICE, run.device), (HOST, run.host)):
            row[place] = (found.total(place) / 1e9, measured)
        rows.append(row)
    return rows


def here(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The variants of `benchmarks.offload` on this machine, the slowest last."""
    env = {"OMP_NUM_THREADS": str(args.threads)}
    fastest: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        file = Path(folder, "speeds.json")
        options = ["--folder", folder, "--speeds", str(file)]
        run_job(sys.executable, ["-m", "zero", "doctor", *options], args.ranks, 300, env)
        speeds = read(file)
        print(speeds, file=sys.stderr)
        for variant in args.variants * args.rounds:
            command = ["-m", "benchmarks.offload.worker", "--variant", variant]
            command += ["--folder", folder, "--model", args.model, "--batch", "1"]
            command += ["--length", str(args.length), "--warmup", "2", "--steps", str(args.steps)]
            reports = run_ranks(sys.executable, command, args.ranks, 900, env)
            # Not the fastest: updates that overlap with the next step make some steps short.
            taken = max(statistics.median(report["seconds"]) for report in reports)
            fastest[variant] = min(taken, fastest.get(variant, taken))
        rows = []
        for variant, taken in sorted(fastest.items(), key=lambda each: each[1]):
            found = predicted(variant, folder, speeds, args)
            row = {"machine": "here", "run": variant, "predicted": found.seconds}
            rows.append(row | {"measured": taken, "parts": found.traffic.parts(speeds, 4)})
    return rows


def predicted(variant: str, folder: str, speeds: Speeds, args: argparse.Namespace) -> Estimate:
    """The estimate of a variant, with the configuration that the worker has."""
    section = VARIANTS[variant].keywords["section"](folder)
    config = load_config({"gradient_clipping": 1.0, "zero_optimization": {"stage": 3, **section}})
    shape = t5_config(MODELS[args.model])
    shape.architectures = ["T5ForConditionalGeneration"]
    question = Question(args.ranks, 1, args.length, False, speeds)
    return estimate(build(shape, torch.float32), config, question)


def table(rows: list[dict[str, Any]]) -> str:
    """Predicted / measured: seconds, and GB where they were measured."""
    lines = ["| machine | run | step, s | ratio | device, GB | host, GB |", "|---" * 6 + "|"]
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        cells = [{"h100": "H100", "here": "this one"}[row["machine"]], row["run"]]
        cells += [f"{predicted:.3f} / {measured:.3f}", f"{predicted / measured:.2f}"]
        for place in (DEVICE, HOST):
            there, taken = row.get(place, (0.0, None))
            cells.append("" if taken is None else f"{there:.1f} / {taken:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=FACTORS, help="one of the machines")
    parser.add_argument("--model", choices=MODELS, default="t5-small", help="for this machine")
    ours = [name for name in VARIANTS if hasattr(VARIANTS[name], "keywords")]
    parser.add_argument("--variants", nargs="+", choices=ours, default=ours)
    parser.add_argument("--ranks", type=count, default=1)
    parser.add_argument("--threads", type=count, default=1, help="compute threads of a process")
    parser.add_argument("--length", type=count, default=128)
    parser.add_argument("--steps", type=count, default=6)
    parser.add_argument("--rounds", type=count, default=3, help="of all variants, in turns")
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPOSITORY / "benchmarks" / "out",
        help="for the files of offload, on the disk that is meant",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = [] if args.only == "here" else on_h100()
    rows += [] if args.only == "h100" else here(args)
    print(json.dumps(rows, indent=2) if args.json else table(rows))
    wrong = [
        row["run"]
        for row in rows
        if not 1 / FACTORS[row["machine"]]
        <= row["predicted"] / row["measured"]
        <= FACTORS[row["machine"]]
    ]
    if wrong:
        sys.exit(f"error: too far off: {'; '.join(wrong)}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
