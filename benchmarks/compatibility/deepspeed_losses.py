"""Compares loss curves of the same script, seed and configuration with DeepSpeed and this engine.

    python -m benchmarks.compatibility.deepspeed_losses --deepspeed-python
    PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED

DeepSpeed has its own environment (`requirements.txt` and `deepspeed==0.19.8`) and runs on the CPU.
Compared on two processes: `initialize`/`backward`/`step` (a T5 and a GPT-2, with and without
accumulation), a third-party Trainer script with the shipped configuration, and
`run_translation.py`. The exit code is 1 if the loss or gradient norm of any step has a relative
difference of more than 1e-4."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.models import build, synthetic_batches, t5
from benchmarks.runner import Parser, Row, finish, ranks, run_job, table

TOLERANCE = 1e-4
STEPS = 20
PROCESSES = 2
CONFIG = "configs/ds_config_zero3.json"
TRAINING = (
    f"--max_steps {STEPS} --logging_steps 1 --warmup_steps 5 --learning_rate 2e-3 --max_grad_norm "
    "1.0 --seed 7"
    " --per_device_train_batch_size 4 --report_to none --save_strategy no --disable_tqdm true"
).split()
# The first variable chooses DeepSpeed's accelerator. Without the argument, accelerate assumes a
# single process.
DEEPSPEED_ENV = {"DS_ACCELERATOR": "cpu"}
DEEPSPEED_TRAINING = ["--use_cpu", "true"]

Curve = list[dict[str, float]]


VOCABULARY = 256
BATCH, SOURCE_LENGTH, TARGET_LENGTH = 4, 12, 9


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def train(package: str, model: str, accumulation: int) -> Curve:
    """On a rank of `zero` or `deepspeed`: return its losses and the global gradient norms."""
    library = importlib.import_module(package)
    library.comm.init_distributed(dist_backend="gloo")
    built = gpt2() if model == "gpt2" else build(t5(64, 128, 2, 4, 16, VOCABULARY), seed=3)
    adamw = {"lr": 2e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01}
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 2e-3, "warmup_num_steps": 5}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adamw},
        "scheduler": {"type": "WarmupLR", "params": warmup | {"warmup_type": "linear"}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    }
    engine, *_ = library.initialize(model=built, model_parameters=built.parameters(), config=config)
    seed = dist.get_rank()
    batches = synthetic_batches(VOCABULARY, BATCH, SOURCE_LENGTH, TARGET_LENGTH, seed)
    curve = []
    for _ in range(STEPS):
        losses = []
        for batch in islice(batches, accumulation):
            labels = batch["input_ids" if model == "gpt2" else "labels"]
            loss = engine(input_ids=batch["input_ids"], labels=labels).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norm = float(engine.get_global_grad_norm())
        curve.append({"loss": sum(losses) / len(losses), "grad_norm": norm})
    return curve


def engine_curve(package: str, python: str, model: str, accumulation: int) -> Curve:
    """Return rank 0's losses and the global gradient norms, with the engine's own interface."""
    env = DEEPSPEED_ENV if package == "deepspeed" else None
    task = {"package": package, "model": model, "accumulation": accumulation}
    return ranks(train, PROCESSES, timeout=600, python=python, env=env, **task)[0]


def script_curve(
    command: dict[str, list[str]], package: str, python: str, arguments: list[str]
) -> Curve:
    """Return the log of a script's Trainer, from `trainer_state.json` in its output folder.

    `command`: the command for each package. It ends with the script's name.
    """
    with tempfile.TemporaryDirectory() as folder:
        line = [
            *command[package],
            "--deepspeed",
            CONFIG,
            "--output_dir",
            folder,
            *arguments,
            *TRAINING,
        ]
        if package == "deepspeed":
            run_job(python, [*line, *DEEPSPEED_TRAINING], PROCESSES, 600, DEEPSPEED_ENV)
        else:
            run_job(python, line, PROCESSES, 600)
        state = json.loads((Path(folder) / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "grad_norm" in entry]


def trainer_curve(package: str, python: str) -> Curve:
    script = "benchmarks/applications/t5_trainer.py"
    return script_curve(
        {"zero": ["-m", "zero", "run", script], "deepspeed": [script]}, package, python, []
    )


def translation_curve(package: str, python: str, start: str) -> Curve:
    """Fine-tune the model in the folder `start` by `run_translation.py`, on its built-in corpus."""
    script = "run_translation.py"
    command = {
        "zero": [script],
        "deepspeed": ["-m", "benchmarks.compatibility.without_hook", script],
    }
    return script_curve(
        command,
        package,
        python,
        ["--do_train", "--model_name_or_path", start, "--overwrite_output_dir"],
    )


def save_translation_model(folder: str) -> None:
    """Run one step of `run_translation.py` from scratch, to save a model and its tokenizer in
    `folder`.

    Both engines start from these weights, because they draw the weights of a new model in different
    orders."""
    options = [
        "--do_train",
        "--max_train_samples",
        "500",
        "--max_steps",
        "1",
        "--overwrite_output_dir",
    ]
    run_job(sys.executable, ["run_translation.py", "--output_dir", folder, *options], 1, 600)


def largest_difference(ours: Curve, theirs: Curve, name: str) -> float:
    """Return the largest relative difference of `name` over the steps."""
    pairs = zip(ours, theirs, strict=True)
    return max(abs(mine[name] - other[name]) / abs(other[name]) for mine, other in pairs)


def runs(start: str) -> dict[str, Callable[[str, str], Curve]]:
    """Return the comparisons: a function (package, python) -> curve for each label."""
    result: dict[str, Callable[[str, str], Curve]] = {
        f"engine, {model}, accumulation {accumulation}": partial(
            engine_curve, model=model, accumulation=accumulation
        )
        for model in ("t5", "gpt2")
        for accumulation in (1, 4)
    }
    result["Trainer script, shipped configuration"] = trainer_curve
    result["run_translation.py, shipped configuration"] = partial(translation_curve, start=start)
    return result


def compare(label: str, curve_of: Callable[[str, str], Curve], deepspeed_python: str) -> Row:
    """Run both engines, and return a line of the table with both curves."""
    theirs = curve_of("deepspeed", deepspeed_python)
    ours = curve_of("zero", sys.executable)
    loss, norm = (largest_difference(ours, theirs, name) for name in ("loss", "grad_norm"))
    row = {"run": label, "steps": len(ours), "first": ours[0]["loss"], "last": ours[-1]["loss"]}
    return row | {"loss diff": loss, "norm diff": norm, "ours": ours, "deepspeed": theirs}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_deepspeed(required=True)
    parser.add_output()
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as start:
        save_translation_model(start)
        rows = [
            compare(label, curve_of, args.deepspeed_python)
            for label, curve_of in runs(start).items()
        ]
    columns = {name: name for name in ("run", "steps", "first", "last", "loss diff", "norm diff")}
    finish(args, table("This engine and DeepSpeed", columns, rows), rows=rows)
    within = [max(row["loss diff"], row["norm diff"]) <= TOLERANCE for row in rows]
    sys.exit(0 if all(within) else 1)


if __name__ == "__main__":
    main()
