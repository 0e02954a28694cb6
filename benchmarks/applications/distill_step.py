"""The time of a student's training step, by where the teacher's probabilities come from, compared
with ordinary fine-tuning.

    python -m benchmarks.applications.distill_step
    python -m benchmarks.applications.distill_step --teacher-width 4096 --teacher-layers 32
        --teacher-intermediate 11008 --only importance "4 bits, from files" --folder FOLDER
        # a teacher shaped like Llama 7B: 13.5 GB of weights, and 3.6 GB of their codes

All variants have the same student, batches and optimizer, and run in one process with one thread.
They take turns, one step each in every round, so that other work on the machine slows all of them
alike; the order changes from round to round. "CPU s" is the median over the rounds of the process's
CPU time, and "ratio" is the median of the ratios to fine-tuning in the same round. Fine-tuning is
the `Seq2SeqTrainer` of transformers; all others are `distill.trainer.DistillationTrainer`."""

# ruff: noqa: E402

from __future__ import annotations

import zero.hf

# This must come first, as in run_distill.py.
zero.hf.enable()

import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from benchmarks.measuring import timed
from benchmarks.runner import Parser, by_variant, existing_folder, finish, summary, table
from distill import cache, pipeline
from distill.config import DistillationConfig
from distill.data import Collator
from distill.teacher import LiveTeacher, load_model
from distill.trainer import DistillationTrainer
from zero.tools.arguments import count

FINE_TUNING = "fine-tuning"
# Options of `DistillationConfig`, whether the teacher is quantized, and the tier of its parameters.
VARIANTS: dict[str, tuple[dict[str, Any], bool, str | None]] = {
    "no teacher": ({"kd_alpha": 0.0}, False, None),
    "importance": ({"teacher_cache": "importance"}, False, None),
    "top k": ({"teacher_cache": "top_k"}, False, None),
    "in memory": ({}, False, None),
    "from host memory": ({}, False, "cpu"),
    "from files": ({}, False, "nvme"),
    "4 bits, in memory": ({}, True, None),
    "4 bits, from host memory": ({}, True, "cpu"),
    "4 bits, from files": ({}, True, "nvme"),
}

Step = Callable[[], None]


def shape(args: Namespace, whose: str) -> LlamaConfig:
    width = getattr(args, f"{whose}_width")
    return LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=width,
        intermediate_size=getattr(args, f"{whose}_intermediate") or 3 * width,
        num_hidden_layers=getattr(args, f"{whose}_layers"), num_attention_heads=width // 64,
        max_position_embeddings=max(2048, args.length), pad_token_id=0,
    )  # fmt: skip


def write_teacher(folder: Path, args: Namespace) -> None:
    """Write a random teacher, in bf16 as large ones are, one weight at a time."""
    config = shape(args, "teacher")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = LlamaForCausalLM(config).state_dict()
    where = {}
    for number, (name, weight) in enumerate(names.items()):
        file = f"{number:05d}.safetensors"
        values = torch.ones(weight.shape) if weight.dim() == 1 else 0.02 * torch.randn(weight.shape)
        save_file({name: values.bfloat16()}, folder / file, metadata={"format": "pt"})
        where[name] = file
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stepper(trainer: Seq2SeqTrainer) -> Step:
    """Return a function that makes one optimizer step, as `trainer.train()` does."""
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    batches: Iterator[Any] = iter(trainer.get_train_dataloader())

    def step() -> None:
        samples, targets = trainer.get_batch_samples(batches, 1, trainer.args.device)
        trainer.training_step(trainer.model, samples[0], targets)
        trainer.optimizer.step()
        trainer.model.zero_grad()

    return step


def make(name: str, args: Namespace, examples: list[dict[str, list[int]]]) -> Step:
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "output_dir": str(args.folder / "out"), "per_device_train_batch_size": args.batch,
        "report_to": "none", "use_cpu": True, "optim": "adamw_torch",
    }  # fmt: skip
    data = {"train_dataset": examples, "data_collator": Collator(0)}
    student = LlamaForCausalLM(shape(args, "student"))
    if name == FINE_TUNING:
        options = Seq2SeqTrainingArguments(**common, remove_unused_columns=False)
        return stepper(Seq2SeqTrainer(student, options, **data))
    given, quantized, tier = VARIANTS[name]
    teacher = None
    if given.get("teacher_cache"):
        given = given | {"teacher_cache": str(args.folder / given["teacher_cache"])}
    elif given.get("kd_alpha") != 0:
        teacher = load_model(str(args.folder / "teacher"), dtype=torch.float32, **coded(quantized))
    if tier is not None:
        section = {"device": tier} | ({"nvme_path": str(args.folder)} if tier == "nvme" else {})
        zero_optimization = {"stage": 3, "offload_param": section | {"max_in_cpu": 0}}
        file = args.folder / f"{tier}.json"
        file.write_text(json.dumps({"zero_optimization": zero_optimization}))
        given = given | {"teacher_deepspeed": str(file)}
    return stepper(
        DistillationTrainer(student, teacher, DistillationConfig(**common, **given), **data)
    )


def coded(quantized: bool) -> dict[str, Any]:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return {"quantization_config": config} if quantized else {}


def write_caches(names: list[str], args: Namespace, examples: Any) -> None:
    """Store what the teacher says, as `run_distill.py cache_teacher` does.

    It has 4 bits if the other variants' teachers do, because it may not fit otherwise.
    """
    wanted = [name for name in names if "teacher_cache" in VARIANTS.get(name, ({},))[0]]
    if not wanted:
        return
    live_ones = set(names) - {*wanted, FINE_TUNING, "no teacher"}
    quantized = bool(live_ones) and all(VARIANTS[name][1] for name in live_ones)
    model = load_model(str(args.folder / "teacher"), dtype=torch.float32, **coded(quantized))
    live = LiveTeacher(model, torch.device("cpu"))
    for name in wanted:
        sampling = VARIANTS[name][0]["teacher_cache"]
        description = cache.Description(
            "teacher", "", "", 1.0, args.top_k, args.vocabulary, sampling
        )
        ask = partial(pipeline.ask, live)
        cache.write_cache(args.folder / sampling, description, examples, Collator(0), ask, 1)


def measure(names: list[str], args: Namespace) -> list[dict[str, dict[str, float]]]:
    """Return the CPU and the wall seconds of each variant's step, by round."""
    generator = torch.Generator().manual_seed(0)
    size = ((args.rounds + 1) * args.batch, args.length)
    ids = torch.randint(3, args.vocabulary, size, generator=generator).tolist()
    positions = list(range(args.length))
    # Packed blocks, as run_distill.py makes them.
    examples = [
        {"input_ids": row, "labels": [-100, *row[1:]], "position_ids": positions} for row in ids
    ]
    write_teacher(args.folder / "teacher", args)
    write_caches(names, args, examples)
    steps = {name: make(name, args, examples) for name in names}
    rounds = []
    for number in range(args.rounds + 1):
        order = names[number % len(names) :] + names[: number % len(names)]
        rounds.append({name: timed(steps[name])[0] for name in order})
    return rounds[1:]  # the first one creates the optimizer's state


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=[FINE_TUNING, *VARIANTS], help="some of the variants")
    add("--vocabulary", type=count, default=32_000)
    for whose, width, layers in (("student", 512, 4), ("teacher", 1024, 8)):
        add(f"--{whose}-width", type=count, default=width, help="a multiple of 64")
        add(f"--{whose}-layers", type=count, default=layers)
        add(f"--{whose}-intermediate", type=count, help="default: three times the width")
    add("--batch", type=count, default=2)
    add("--length", type=count, default=128)
    add("--top-k", type=count, default=12)
    add("--rounds", type=count, default=7)
    add("--folder", type=existing_folder, help="for the teacher's files; default: a temporary one")
    parser.add_output()
    args = parser.parse_args()
    names = list(dict.fromkeys([FINE_TUNING, *(args.only or VARIANTS)]))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.folder = Path(folder)
        (args.folder / "teacher").mkdir()
        rounds = measure(names, args)
    _, rows = summary(rounds, names, {}, {}, ("cpu",))
    tokens = args.batch * args.length
    columns = {"the teacher": "variant", "CPU s a step": "cpu", "ms a token": ("cpu", tokens / 1e3)}
    columns |= {"ratio": "cpu ratio", "wall s a step": "seconds"}
    caption = f"{tokens} tokens a step, {args.rounds} rounds"
    finish(args, table(caption, columns, by_variant(rows)), rows=rows, rounds=rounds)


if __name__ == "__main__":
    main()
