"""`--resume_from_checkpoint` of an unpatched Trainer: the run goes on, on the same or another
number of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.hf.trainer_runs import AUTO, SCRIPTS, column, write_jobs
from tests.processes import fork_ranks, torchrun
from tests.releases import needs
from zero.checkpoint import find_resumable

ZERO = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "sections": {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
        },
    },
    "the Trainer's own": {},
}
# Dropout shows whether random states are restored. Without dropout, another number of ranks gives
# the same losses.
DROPOUT = {"sections": 0.1, "the Trainer's own": 0.0}
SAME_BATCHES = needs(
    "transformers",
    "5.0",
    "resumed in a later epoch, its Trainer takes other batches, also by itself",
)
# An epoch has eight steps, so one ends between the save and the end.
SAMPLES, SAVED, STOPPED, STEPS, GLOBAL_BATCH = 48, 10, 12, 20, 6


def _job(name: str, output: Path, nproc: int, **others: Any) -> dict[str, Any]:
    arguments = {
        "output_dir": str(output), "max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1,
        "learning_rate": 1e-3, "use_cpu": True, "bf16": name == "sections",
        "per_device_train_batch_size": GLOBAL_BATCH // nproc,
        "lr_scheduler_type": "cosine", "warmup_steps": 4, "average_tokens_across_devices": False,
        "deepspeed": {"zero_optimization": ZERO} | AUTO | CONFIGS[name],
    }  # fmt: skip
    job = {"model": "t5", "samples": SAMPLES, "dropout": DROPOUT[name], "save": True}
    return {**job, "arguments": arguments, **others}


def _run(folder: Path, nproc: int, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports by the names of the jobs.

    If the last job does not end, its entry is the output.
    """
    path = write_jobs(list(jobs.values()), folder)
    # SIGTERM goes to the launcher.
    start = torchrun if any("sigterm_at" in job for job in jobs.values()) else fork_ranks
    process = start("-m", "zero", "run", SCRIPTS / "resume.py", path, nproc=nproc, timeout=240)
    ended = [name for name, job in jobs.items() if "sigterm_at" in job]
    assert (process.returncode != 0) == bool(ended), process.stdout + process.stderr
    reports: dict[str, Any] = dict.fromkeys(ended, process.stdout + process.stderr)
    for name in jobs.keys() - set(ended):
        reports[name] = json.loads(Path(jobs[name]["report"]).read_text(encoding="utf-8"))
        reports[name]["folder"] = jobs[name]["arguments"]["output_dir"]
    return reports


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return folder and reports of uninterrupted runs on two ranks."""
    folder = tmp_path_factory.mktemp("straight")
    jobs = {name: _job(name, folder / name, 2) for name in CONFIGS}
    return folder, _run(folder, 2, jobs)


@pytest.fixture(scope="module")
def preempted(tmp_path_factory):
    """Return the folder and the output of a run that got SIGTERM. Its saves are asynchronous."""
    folder = tmp_path_factory.mktemp("preempted")
    job = _job("sections", folder / "preempted", 2, sigterm_at=STOPPED)
    job["arguments"]["deepspeed"] |= {"checkpoint": {"async_save": True}}
    return folder, _run(folder, 2, {"preempted": job})["preempted"]


@pytest.fixture(scope="module")
def resumed(straight, preempted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    sources = {name: straight[0] / name / f"checkpoint-{SAVED}" for name in CONFIGS}
    sources["preempted"] = find_resumable(preempted[0] / "preempted")
    jobs = {
        name: _job(name if name in CONFIGS else "sections", folder / name, 2, resume=str(source))
        for name, source in sources.items()
    }
    return _run(folder, 2, jobs)


def test_sigterm_leaves_a_checkpoint_of_the_step_at_hand(preempted):
    folder, output = preempted
    checkpoint = folder / "preempted" / f"checkpoint-{STOPPED}"
    assert find_resumable(folder / "preempted") == checkpoint
    said = f"zero: SIGTERM: stopped after step {STOPPED}; the checkpoint {checkpoint} is complete"
    assert output.count(said) == 1, output


@SAME_BATCHES
@pytest.mark.parametrize("name", [*CONFIGS, "preempted"])
def test_same_number_of_ranks_goes_on_bit_for_bit(name, straight, resumed):
    reference = straight[1][name if name in CONFIGS else "sections"]
    for key in ("loss", "grad_norm", "learning_rate"):
        assert len(column(reference, key)) == STEPS
        assert column(resumed[name], key) == column(reference, key), key
    assert resumed[name]["random"] == reference["random"]
    found, expected = (
        load_file(Path(report["folder"], "model.safetensors"))
        for report in (resumed[name], reference)
    )
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@needs("transformers", "5.2", "its Trainer takes the batch size of a rank from the folder")
@pytest.mark.parametrize("nproc", [1, 3])
def test_another_number_of_ranks_goes_on(nproc, straight, tmp_path):
    name = "the Trainer's own"
    source = straight[0] / name / f"checkpoint-{SAVED}"
    other = _run(
        tmp_path, nproc, {name: _job(name, tmp_path / "output", nproc, resume=str(source))}
    )[name]
    reference = straight[1][name]
    assert column(other, "loss") == pytest.approx(column(reference, "loss"), rel=1e-5)
    assert column(other, "learning_rate") == column(reference, "learning_rate")
