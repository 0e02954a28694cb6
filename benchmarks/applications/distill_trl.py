"""DistillationTrainer beside TRL's GKDTrainer: losses, tokens per second, and memory.

    python -m benchmarks.applications.distill_trl

Both trainers get the same student, teacher, tokens and recipe (forward KL or JSD at T 1, no text of
their own), on one process and on two, without an engine. Each runs alone, in processes of its own.
"difference" is the largest relative one between the losses of a step. Tokens per second are those
of the fastest step after the first, by the CPU time of rank 0, which other work on the machine does
not disturb; on an accelerator by wall time. "MiB" is the most memory that a process has had, less
what it had before the first step: of the accelerator, or of the host where there is none. TRL's own
DistillationTrainer is not compared, because it always lets the student write."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY
from distill.config import DistillationConfig
from distill.corpus import train_tokenizer
from distill.data import Collator
from distill.trainer import DistillationTrainer
from zero.tools.arguments import count

RECIPES = {"forward KL": ("forward_kl", 0.0), "JSD": ("jsd", 0.5)}
TRAINERS = ("GKDTrainer", "DistillationTrainer")


class Clock(TrainerCallback):
    """Takes the time of each step, and the memory before the first one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.memory = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.memory = memory("VmRSS")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self.start)


def now() -> float:
    return time.perf_counter() if torch.accelerator.is_available() else time.process_time()


def memory(which: str) -> float:
    """Return MiB of this process: allocated on the accelerator ("VmHWM": the most), or resident."""
    if torch.accelerator.is_available():
        kind = torch.get_device_module()
        peak = which == "VmHWM"
        return (kind.max_memory_allocated() if peak else kind.memory_allocated()) / 2**20
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(which))


def llama(layers: int, width: int, vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(layers)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width,
            num_hidden_layers=layers, num_attention_heads=width // 32, initializer_range=0.05,
            pad_token_id=0, bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip


def train(args: argparse.Namespace) -> None:
    """Train with one trainer, and write losses, speed and memory of rank 0."""
    student = llama(args.layers, args.width, args.vocabulary)
    teacher = llama(2 * args.layers, 2 * args.width, args.vocabulary)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(0)
    size = (args.steps * args.batch, args.length)
    rows = torch.randint(2, args.vocabulary, size, generator=generator).tolist()
    examples = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]
    loss_type, beta = RECIPES[args.recipe]
    common: dict[str, Any] = {
        "output_dir": str(args.report.with_suffix("")), "report_to": "none", "save_strategy": "no",
        "per_device_train_batch_size": args.batch // ranks, "max_steps": args.steps,
        "logging_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "disable_tqdm": True, "use_cpu": not torch.accelerator.is_available(), "bf16": False,
        "gradient_checkpointing": False, "ddp_find_unused_parameters": False,
    }  # fmt: skip
    clock = Clock()
    given: dict[str, Any] = {
        "data_collator": Collator(0), "callbacks": [clock],
        "processing_class": train_tokenizer(["a"], 258),
    }  # fmt: skip
    if args.trainer == "GKDTrainer":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        config = GKDConfig(**common, lmbda=0.0, beta=beta, temperature=1.0)
        trainer = GKDTrainer(
            student, teacher, config, train_dataset=Dataset.from_list(examples), **given
        )
    else:
        # beta does not count for forward_kl, and must be between 0 and 1.
        config = DistillationConfig(**common, kd_alpha=1.0, loss_type=loss_type, beta=beta or 0.5)
        trainer = DistillationTrainer(student, teacher, config, train_dataset=examples, **given)
    trainer.train()
    tokens = args.batch * args.length
    found = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "tokens_per_second": tokens / ranks / min(clock.seconds[1:]),
        "mib": memory("VmHWM") - clock.memory,
    }
    if trainer.is_world_process_zero():
        args.report.write_text(json.dumps(found))


def measure(args: argparse.Namespace, ranks: int, recipe: str, trainer: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        own = [
            "-m", "benchmarks.applications.distill_trl", "--worker", trainer, "--recipe", recipe,
            "--report", str(report),
        ]  # fmt: skip
        for name in ("steps", "batch", "length", "layers", "width", "vocabulary"):
            own += [f"--{name}", str(getattr(args, name))]
        launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        subprocess.run(
            [sys.executable, *(launch if ranks > 1 else []), *own],
            check=True, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": threads},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(report.read_text())


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=count, default=8)
    parser.add_argument("--batch", type=count, default=4, help="of all processes together")
    parser.add_argument("--length", type=count, default=128)
    parser.add_argument("--layers", type=count, default=3, help="of the student; the teacher: two")
    parser.add_argument("--width", type=count, default=128, help="likewise")
    parser.add_argument("--vocabulary", type=count, default=16000)
    output = REPOSITORY / "benchmarks" / "out" / "distill_trl.json"
    parser.add_argument("--output", type=result_file, default=output)
    parser.add_argument("--worker", dest="trainer", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--recipe", choices=RECIPES, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        train(args)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return
    print("| processes, loss | difference | tokens/s of a process, TRL | ours | MiB, TRL | ours |")
    print("|---|---|---|---|---|---|")
    results = {}
    for ranks in (1, 2):
        for recipe in RECIPES:
            theirs, ours = (measure(args, ranks, recipe, trainer) for trainer in TRAINERS)
            pairs = zip(theirs["losses"], ours["losses"], strict=True)
            difference = max(abs(one - other) / abs(one) for one, other in pairs)
            speeds = [f"{each['tokens_per_second']:,.0f}" for each in (theirs, ours)]
            sizes = [f"{each['mib']:,.0f}" for each in (theirs, ours)]
            row = [f"{ranks}, {recipe}", f"{difference:.0e}", *speeds, *sizes]
            print(f"| {' | '.join(row)} |", flush=True)
            results[f"{ranks}, {recipe}"] = {"GKDTrainer": theirs, "DistillationTrainer": ours}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=2))
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
