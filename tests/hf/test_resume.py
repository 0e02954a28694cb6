"""`--resume_from_checkpoint` of an unpatched Trainer: the same run goes on, on the same or another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hf.trainer_runs import SCRIPTS, column, write_jobs
from tests.launch import torchrun

ZERO = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
CONFIGS: dict[str, dict[str, Any]] = {
    "sections": {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
        "gradient_clipping": "auto",
    },
    "the Trainer's own": {"gradient_clipping": "auto"},
}
# Dropout shows whether the random states came back; without it, another number of ranks can give the same losses.
DROPOUT = {"sections": 0.1, "the Trainer's own": 0.0}
SAVED, STEPS, GLOBAL_BATCH = 5, 10, 6


def _run(folder: Path, nproc: int, names: list[str], resume_from: Path | None = None) -> dict[str, dict[str, Any]]:
    jobs = []
    for name in names:
        output = folder / name.replace(" ", "_")
        arguments = {
            "output_dir": str(output), "max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1,
            "learning_rate": 1e-3, "use_cpu": True,
            "per_device_train_batch_size": GLOBAL_BATCH // nproc, "bf16": name == "sections",
            "lr_scheduler_type": "cosine", "warmup_steps": 4, "deepspeed": {"zero_optimization": ZERO} | BATCH | CONFIGS[name],
        }  # fmt: skip
        job = {"dropout": DROPOUT[name], "arguments": arguments}
        if resume_from is not None:
            job["resume"] = str(resume_from / output.name / f"checkpoint-{SAVED}")
        jobs.append(job)
    path = write_jobs(jobs, folder)
    process = torchrun("-m", "zero", "run", SCRIPTS / "resume.py", path, nproc=nproc, timeout=240)
    assert process.returncode == 0, process.stdout + process.stderr
    reports = [json.loads(Path(job["report"]).read_text(encoding="utf-8")) for job in jobs]
    return dict(zip(names, reports, strict=True))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder and the reports of two ranks that were never interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, _run(folder, 2, list(CONFIGS))


@pytest.fixture(scope="module")
def resumed(straight, tmp_path_factory):
    return _run(tmp_path_factory.mktemp("resumed"), 2, list(CONFIGS), straight[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_same_number_of_ranks_goes_on_bit_for_bit(name, straight, resumed):
    reference = straight[1][name]
    for key in ("loss", "grad_norm", "learning_rate"):
        assert len(column(reference, key)) == STEPS
        assert column(resumed[name], key) == column(reference, key), key
    assert resumed[name]["sums"] == reference["sums"]
    assert resumed[name]["random"] == reference["random"]


@pytest.mark.parametrize("nproc", [1, 3])
def test_another_number_of_ranks_goes_on(nproc, straight, tmp_path):
    name = "the Trainer's own"
    other = _run(tmp_path, nproc, [name], straight[0])[name]
    reference = straight[1][name]
    assert column(other, "loss") == pytest.approx(column(reference, "loss"), rel=1e-5)
    assert column(other, "learning_rate") == column(reference, "learning_rate")
