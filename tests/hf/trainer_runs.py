"""Runs jobs of `scripts/jobs.py` in their own processes and returns their reports."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.processes import REPOSITORY, fork_ranks

SCRIPTS = Path(__file__).parent / "scripts"
SHIPPED_CONFIG = REPOSITORY / "configs" / "ds_config_zero3.json"
TIMEOUT = 240.0
# What the Trainer fills in.
AUTO = dict.fromkeys(
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ),
    "auto",
)
# Two epochs of two steps, of two micro-batches; batches are shuffled.
TWO_EPOCHS = {
    "num_train_epochs": 2, "gradient_accumulation_steps": 2, "logging_steps": 1,
    "max_grad_norm": 0.5, "learning_rate": 1e-3, "save_strategy": "no",
}  # fmt: skip

Job = dict[str, Any]


def write_jobs(jobs: list[Job], folder: Path) -> Path:
    """Give each job a report file and an output folder, and write the list to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, job in enumerate(jobs):
        job["report"] = str(folder / f"report{number}.json")
        job["arguments"].setdefault("output_dir", str(folder / f"output{number}"))
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    return path


def _reports(jobs: list[Job], process: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert process.returncode == 0, process.stdout + process.stderr
    return [json.loads(Path(job["report"]).read_text(encoding="utf-8")) for job in jobs]


def run_plain(jobs: list[Job], folder: Path) -> list[dict[str, Any]]:
    """Run in one process without zero: what the Trainer does by itself."""
    path = write_jobs(jobs, folder)
    return _reports(
        jobs,
        fork_ranks(SCRIPTS / "jobs.py", path, nproc=0, timeout=TIMEOUT, imported="transformers"),
    )


def run_unmodified(jobs: list[Job], folder: Path, nproc: int) -> list[dict[str, Any]]:
    """Run the plain script under `-m zero run`."""
    path = write_jobs(jobs, folder)
    return _reports(
        jobs,
        fork_ranks("-m", "zero", "run", SCRIPTS / "jobs.py", path, nproc=nproc, timeout=TIMEOUT),
    )


def column(report: dict[str, Any], key: str) -> list[float]:
    """Return the value of `key` in each logged training step."""
    return [entry[key] for entry in report["log"] if key in entry]


def assert_trains_as(
    report: dict[str, Any],
    plain: dict[str, Any],
    ranks: int,
    loss: float = 1e-6,
    norm: float = 1e-6,
) -> None:
    """The engine's losses, norms and evaluation are those of a plain run, within so much."""
    assert (report["engine"], report["world_size"]) == ("DeepSpeedEngine", ranks)
    for key, allowed in (("loss", loss), ("grad_norm", norm)):
        assert len(column(plain, key)) > 1
        assert column(report, key) == pytest.approx(column(plain, key), rel=allowed)
    found, expected = (each["evaluation"]["eval_loss"] for each in (report, plain))
    assert found == pytest.approx(expected, rel=loss)
