"""`--resume_from_checkpoint` of an unpatched Trainer: the run goes on, on the same or another
number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.hf.trainer_runs import AUTO, SCRIPTS, column, run_unmodified, write_jobs
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
SAME_BATCHES = needs("transformers", "5.0", "its Trainer resumes an epoch with other batches")
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


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return folder and reports of uninterrupted runs on two ranks."""
    folder = tmp_path_factory.mktemp("straight")
    jobs = [_job(name, folder / name, 2) for name in CONFIGS]
    return folder, dict(zip(CONFIGS, run_unmodified(jobs, folder, 2), strict=True))


@pytest.fixture(scope="module")
def preempted(tmp_path_factory):
    """Return the folder and the output of a run that got SIGTERM. Its saves are asynchronous."""
    folder = tmp_path_factory.mktemp("preempted")
    job = _job("sections", folder / "preempted", 2, sigterm_at=STOPPED)
    job["arguments"]["deepspeed"] |= {"checkpoint": {"async_save": True}}
    # SIGTERM goes to the launcher.
    script = (SCRIPTS / "resume.py", write_jobs([job], folder))
    process = torchrun("-m", "zero", "run", *script, nproc=2, timeout=240)
    output = process.stdout + process.stderr
    assert process.returncode, output
    return folder, output


@pytest.fixture(scope="module")
def resumed(straight, preempted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    sources = {name: straight[0] / name / f"checkpoint-{SAVED}" for name in CONFIGS}
    sources["preempted"] = find_resumable(preempted[0] / "preempted")
    jobs = [
        _job(name if name in CONFIGS else "sections", folder / name, 2, resume=str(source))
        for name, source in sources.items()
    ]
    return folder, dict(zip(sources, run_unmodified(jobs, folder, 2), strict=True))


def test_sigterm_leaves_a_checkpoint_of_the_step_at_hand(preempted):
    folder, output = preempted
    checkpoint = folder / "preempted" / f"checkpoint-{STOPPED}"
    assert find_resumable(folder / "preempted") == checkpoint
    said = f"zero: SIGTERM: stopped after step {STOPPED}; the checkpoint {checkpoint} is complete"
    assert output.count(said) == 1, output


@SAME_BATCHES
@pytest.mark.parametrize("name", [*CONFIGS, "preempted"])
def test_same_number_of_ranks_goes_on_bit_for_bit(name, straight, resumed):
    original = name if name in CONFIGS else "sections"
    found, expected = resumed[1][name], straight[1][original]
    for key in ("loss", "grad_norm", "learning_rate"):
        assert len(column(expected, key)) == STEPS
        assert column(found, key) == column(expected, key), key
    assert found["random"] == expected["random"]
    folders = (resumed[0] / name, straight[0] / original)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


@needs("transformers", "5.2", "its Trainer takes the batch size of a rank from the folder")
@pytest.mark.parametrize("nproc", [1, 3])
def test_another_number_of_ranks_goes_on(nproc, straight, tmp_path):
    name = "the Trainer's own"
    source = straight[0] / name / f"checkpoint-{SAVED}"
    job = _job(name, tmp_path / "output", nproc, resume=str(source))
    (other,) = run_unmodified([job], tmp_path, nproc)
    reference = straight[1][name]
    assert column(other, "loss") == pytest.approx(column(reference, "loss"), rel=1e-5)
    assert column(other, "learning_rate") == column(reference, "learning_rate")


@pytest.mark.timeout(600)
def test_kills_are_survived_and_damage_is_noticed():
    """The short version of `python -m benchmarks.faults`, through the real Trainer."""
    words = "--trials 1 --seed 11 --parts kills damage".split()
    done = fork_ranks("-m", "benchmarks.faults", *words, nproc=0, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills resumed bit for bit; 0 failed" in done.stdout
    assert done.stdout.count("; 0 failed") == 2
