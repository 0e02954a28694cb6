"""Compares loss curves of the same script, seed and configuration with DeepSpeed and this engine.

    python -m benchmarks.compatibility.deepspeed_losses --deepspeed-python
    PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED

DeepSpeed has its own environment (`requirements.txt` and `deepspeed==0.19.8`) and runs on the CPU.
Compared on two processes: `initialize`/`backward`/`step` (a T5 and a GPT-2, with and without
accumulation), a third-party Trainer script with the shipped configuration, and
`run_translation.py`. The exit code is 1 if the loss or gradient norm of any step has a relative
difference of more than 1e-4."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser, interpreter, result_file
from benchmarks.launch import REPOSITORY, run_job, run_ranks

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


def engine_curve(package: str, python: str, model: str, accumulation: int) -> Curve:
    """Return rank 0's losses and the global gradient norms, with the engine's own interface."""
    options = (
        f"--package {package} --model {model} --steps {STEPS} --accumulation {accumulation}".split()
    )
    command = ["-m", "benchmarks.compatibility.deepspeed_losses_worker", *options]
    return run_ranks(
        python, command, PROCESSES, 600, DEEPSPEED_ENV if package == "deepspeed" else None
    )[0]["curve"]


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


def compare(
    label: str, curve_of: Callable[[str, str], Curve], deepspeed_python: str
) -> dict[str, Any]:
    """Run both engines, print a line of the table, and return its numbers with both curves."""
    theirs = curve_of("deepspeed", deepspeed_python)
    ours = curve_of("zero", sys.executable)
    loss, norm = (largest_difference(ours, theirs, name) for name in ("loss", "grad_norm"))
    agrees = max(loss, norm) <= TOLERANCE
    print(
        f"{label:<42}  {len(ours):>5}  {ours[0]['loss']:8.4f}  {ours[-1]['loss']:8.4f}  "
        f"{loss:9.1e}  {norm:9.1e}"
        f"{'' if agrees else f'  more than {TOLERANCE:.0e}'}",
        flush=True,
    )
    differences = {"agrees": agrees, "loss_difference": loss, "grad_norm_difference": norm}
    return {**differences, "ours": ours, "deepspeed": theirs}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--deepspeed-python",
        type=interpreter,
        required=True,
        help="interpreter of an environment that has deepspeed",
    )
    parser.add_argument(
        "--output",
        type=result_file,
        default=REPOSITORY / "benchmarks" / "out" / "parity_deepspeed.json",
    )
    args = parser.parse_args()

    print(
        f"{'run':<42}  {'steps':>5}  {'first':>8}  {'last':>8}  {'loss diff':>9}  {'norm diff':>9}"
    )
    results = {}
    with tempfile.TemporaryDirectory() as start:
        save_translation_model(start)
        for label, curve_of in runs(start).items():
            results[label] = compare(label, curve_of, args.deepspeed_python)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=2))
    print(f"written: {args.output}")
    sys.exit(0 if all(result["agrees"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
