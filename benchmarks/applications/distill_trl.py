"""DistillationTrainer beside TRL's GKDTrainer: losses, tokens per second, and memory.

    python -m benchmarks.applications.distill_trl

Both trainers get the same student, teacher, tokens and recipe (forward KL or JSD at T 1, no text of
their own), on one process and on two, without an engine. Each runs alone, in processes of its own.
"difference" is the largest relative one between the losses of a step. Tokens per second are those
of the fastest step after the first, by the CPU time of rank 0 and its one thread, which other work
on the machine hardly disturbs; on an accelerator by wall time. "MiB" is the most memory that a
process has had, less what it had before the first step: of the accelerator, or of the host where
there is none. TRL's own DistillationTrainer is not compared, because it always lets the student
write.

GKDTrainer gets `average_tokens_across_devices=False`. With the Trainer's default, its
`compute_loss` (TRL 1.16) divides by the tokens of all ranks, and DDP then averages the gradients:
loss and gradients are divided by the number of ranks once too often. All examples have one length
here, so that the mean of the ranks' means is the mean over all tokens, which DistillationTrainer
computes."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from benchmarks.measuring import PeakMemory
from benchmarks.runner import Parser, Row, finish, ranks, relative, table
from distill.config import DistillationConfig
from distill.corpus import train_tokenizer
from distill.data import Collator
from distill.trainer import DistillationTrainer
from zero.tools.arguments import count

RECIPES = {"forward KL": ("forward_kl", 0.0), "JSD": ("jsd", 0.5)}
TRAINERS = ("GKDTrainer", "DistillationTrainer")
MIB = 1 << 20


class Clock(TrainerCallback):
    """Takes the time of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self.start)


def now() -> float:
    return time.perf_counter() if torch.accelerator.is_available() else time.process_time()


def llama(layers: int, width: int, vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(layers)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width,
            num_hidden_layers=layers, num_attention_heads=width // 32, initializer_range=0.05,
            pad_token_id=0, bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip


def train(
    trainer: str, recipe: str, steps: int, batch: int, length: int, layers: int, width: int,
    vocabulary: int,
) -> Row:  # fmt: skip
    """Train with one trainer. Returns the losses, tokens per second, and bytes."""
    student = llama(layers, width, vocabulary)
    teacher = llama(2 * layers, 2 * width, vocabulary)
    of_all = int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, vocabulary, (steps * batch, length), generator=generator).tolist()
    examples = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]
    loss_type, beta = RECIPES[recipe]
    clock, has_device = Clock(), torch.accelerator.is_available()
    given: dict[str, Any] = {
        "data_collator": Collator(0), "callbacks": [clock],
        "processing_class": train_tokenizer(["a"], 258),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder, "report_to": "none", "save_strategy": "no",
            "per_device_train_batch_size": batch // of_all, "max_steps": steps,
            "logging_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
            "disable_tqdm": True, "use_cpu": not has_device, "bf16": False,
            "gradient_checkpointing": False, "ddp_find_unused_parameters": False,
        }  # fmt: skip
        made: Any
        if trainer == "GKDTrainer":
            from trl.experimental.gkd import GKDConfig, GKDTrainer

            common["average_tokens_across_devices"] = False
            config = GKDConfig(**common, lmbda=0.0, beta=beta, temperature=1.0)
            data = Dataset.from_list(examples)
            made = GKDTrainer(student, teacher, config, train_dataset=data, **given)
        else:
            # beta does not count for forward_kl, and must be between 0 and 1.
            own = DistillationConfig(**common, kd_alpha=1.0, loss_type=loss_type, beta=beta or 0.5)
            made = DistillationTrainer(student, teacher, own, train_dataset=examples, **given)
        before = torch.accelerator.memory_allocated() if has_device else 0
        with PeakMemory("VmRSS") as memory:
            made.train()
        extra = torch.accelerator.max_memory_allocated() - before if has_device else memory.extra
    return {
        "losses": [entry["loss"] for entry in made.state.log_history if "loss" in entry],
        "tokens per second": batch * length / of_all / min(clock.seconds[1:]),
        "memory": extra,
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=count, default=8)
    parser.add_argument("--batch", type=count, default=4, help="of all processes together")
    parser.add_argument("--length", type=count, default=128)
    parser.add_argument("--layers", type=count, default=3, help="of the student; the teacher: two")
    parser.add_argument("--width", type=count, default=128, help="likewise")
    parser.add_argument("--vocabulary", type=count, default=16000)
    parser.add_output()
    args = parser.parse_args()
    task = {name: value for name, value in vars(args).items() if name != "output"}
    rows: list[Row] = []
    for number in (1, 2):
        env = {"OMP_NUM_THREADS": "1"}
        for recipe in RECIPES:
            first: Row = {}
            for trainer in TRAINERS:
                row = ranks(train, number, env=env, trainer=trainer, recipe=recipe, **task)[0]
                first = first or row
                row |= {"difference": relative(row["losses"], first["losses"])}
                rows.append(row | {"ranks": number, "loss": recipe, "trainer": trainer})
    columns = {
        "ranks": "ranks", "loss": "loss", "trainer": "trainer", "difference": "difference",
        "tokens/s of a rank": "tokens per second", "MiB": ("memory", MIB),
    }  # fmt: skip
    finish(args, table("DistillationTrainer beside TRL's GKDTrainer:", columns, rows), rows=rows)


if __name__ == "__main__":
    main()
