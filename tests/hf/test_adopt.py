"""A run of the Trainer moves from one engine to another, and goes on at the losses of the run that
was not interrupted: zero, the plain Trainer, zero again; and from a folder in DeepSpeed's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.trainer_runs import AUTO, column, run_plain, run_unmodified
from tests.tolerance import rounding
from zero.tools.cli import main

MODELS = ("t5", "llama")
SAVED, STEPS, GLOBAL_BATCH = 2, 12, 4


def jobs(nproc: int, folder: Path | None = None, on_zero: bool = True) -> list[dict[str, Any]]:
    """A job for each model; it resumes from the model's checkpoint in the folder."""
    arguments = {
        "max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1, "learning_rate": 1e-3,
        "weight_decay": 0.1, "use_cpu": True, "lr_scheduler_type": "cosine", "warmup_steps": 4,
        "per_device_train_batch_size": GLOBAL_BATCH // nproc, "max_grad_norm": 0.0,
        "average_tokens_across_devices": False, "optim": "adamw_torch",
    }  # fmt: skip
    if on_zero:
        arguments["deepspeed"] = AUTO | {"zero_optimization": {"stage": 3}}
    found = {} if folder is None else {path.parent.name: path for path in folder.glob("*/*")}
    resume = {model: str(found[model]) if found else None for model in MODELS}
    return [{"model": m, "arguments": dict(arguments), "resume": resume[m]} for m in MODELS]


def move(runs: Path, step: int, out: Path, *command: str) -> Path:
    """Write each run's checkpoint of this step in another form."""
    for number, model in enumerate(MODELS):
        folder = runs / f"output{number}" / f"checkpoint-{step}"
        name, *options = command
        main([name, str(folder), *options, str(out / model / folder.name)])
    return out


def test_runs_go_on_with_another_engine(tmp_path: Path) -> None:
    started, plain = tmp_path / "started", tmp_path / "plain"
    expected = run_unmodified(jobs(2), started, 2)
    for_plain = move(started, SAVED, tmp_path / "hf", "convert", "--to", "hf")
    found = [run_plain(jobs(1, for_plain, on_zero=False), plain)]
    adopted = move(plain, 2 * SAVED, tmp_path / "adopted", "adopt")
    found += [run_unmodified(jobs(n, adopted), tmp_path / f"zero{n}", n) for n in (1, 2)]
    for reports in found:
        for report, goal in zip(reports, expected, strict=True):
            losses, whole = column(report, "loss"), column(goal, "loss")
            assert len(losses) == len(whole) == STEPS
            # On two ranks the sums over a batch have another order.
            allowed = rounding(torch.float32, 1) * whole[0]
            assert losses == pytest.approx(whole, rel=0, abs=max(1e-7, allowed))
    of_deepspeed = move(started, SAVED, tmp_path / "ds", "convert", "--to", "deepspeed")
    for folder in of_deepspeed.glob("*/*"):
        (folder / "zero_to_fp32.py").touch()  # DeepSpeed has it there, too
    before = {path: path.stat().st_mtime_ns for path in of_deepspeed.rglob("*")}
    reports = run_unmodified(jobs(2, of_deepspeed), tmp_path / "resumed", 2)
    assert before == {path: path.stat().st_mtime_ns for path in of_deepspeed.rglob("*")}
    for report, goal in zip(reports, expected, strict=True):
        assert column(report, "loss") == column(goal, "loss")
