"""A run of the Trainer with another engine goes on with zero, at the losses of the run that was not
interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.trainer_runs import column, run_plain, run_unmodified
from tests.tolerance import rounding
from zero.tools.cli import main

SAVED, STEPS, GLOBAL_BATCH = 2, 12, 4
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3},
}


def job(model: str, nproc: int = 1, **others: Any) -> dict[str, Any]:
    arguments = {
        "max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1, "learning_rate": 1e-3,
        "weight_decay": 0.1, "use_cpu": True, "lr_scheduler_type": "cosine", "warmup_steps": 4,
        "per_device_train_batch_size": GLOBAL_BATCH // nproc, "max_grad_norm": 0.0,
        "average_tokens_across_devices": False, "optim": "adamw_torch",
    }  # fmt: skip
    return {"model": model, "arguments": arguments, **others}


def assert_equal_losses(report: dict[str, Any], expected: dict[str, Any], relative: float) -> None:
    losses, goal = column(report, "loss"), column(expected, "loss")
    assert len(losses) == len(goal) == STEPS
    allowed = max(1e-7, relative * goal[0])
    assert losses[SAVED:] == pytest.approx(goal[SAVED:], rel=0, abs=allowed)


def assert_goes_on(adopted: dict[str, Path], plain: list[dict[str, Any]], folder: Path) -> None:
    """Resume from the checkpoint of each model, and compare with the runs that went on."""
    for nproc in (1, 2):
        jobs = [job(model, nproc, resume=str(each)) for model, each in adopted.items()]
        for each in jobs:
            each["arguments"]["deepspeed"] = ZERO
        reports = run_unmodified(jobs, folder / str(nproc), nproc)
        for report, expected in zip(reports, plain, strict=True):
            # On two ranks the sums over a batch have another order.
            assert_equal_losses(report, expected, rounding(torch.float32, 1))


def test_folder_of_the_plain_trainer(tmp_path: Path) -> None:
    plain = run_plain([job("t5"), job("llama")], tmp_path / "plain")
    adopted = {}
    for number, model in enumerate(("t5", "llama")):
        folder = tmp_path / "plain" / f"output{number}" / f"checkpoint-{SAVED}"
        adopted[model] = tmp_path / model / folder.name
        main(["adopt", str(folder), str(adopted[model])])
    assert_goes_on(adopted, plain, tmp_path)


def test_back_to_the_plain_trainer(tmp_path: Path) -> None:
    with_zero = [job("t5", 2), job("llama", 2)]
    for each in with_zero:
        each["arguments"]["deepspeed"] = ZERO
    reports = run_unmodified(with_zero, tmp_path / "zero", 2)
    resumed = []
    for number, each in enumerate(with_zero):
        folder = tmp_path / "zero" / f"output{number}" / f"checkpoint-{SAVED}"
        out = tmp_path / each["model"] / folder.name
        main(["convert", str(folder), "--to", "hf", str(out)])
        resumed.append(job(each["model"], resume=str(out)))
    for report, expected in zip(run_plain(resumed, tmp_path / "plain"), reports, strict=True):
        assert_equal_losses(report, expected, rounding(torch.float32, 1))


def test_folder_of_deepspeed(tmp_path: Path) -> None:
    first = job("t5")
    first["arguments"]["deepspeed"] = ZERO
    (whole,) = run_unmodified([first], tmp_path / "zero", 1)
    folder = tmp_path / "zero" / "output0" / f"checkpoint-{SAVED}"
    out = tmp_path / "deepspeed" / folder.name
    main(["convert", str(folder), "--to", "deepspeed", str(out)])
    (out / "zero_to_fp32.py").touch()  # DeepSpeed has it there, too
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    resumed = job("t5", resume=str(out))
    resumed["arguments"]["deepspeed"] = ZERO
    (report,) = run_unmodified([resumed], tmp_path / "resumed", 1)
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert_equal_losses(report, whole, 0)
