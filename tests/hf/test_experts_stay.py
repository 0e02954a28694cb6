"""Experts that stay on their ranks: the Trainer, unmodified, beside one process; under accelerate's
launcher also TRL and an own loop, beside gathered experts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralForCausalLM

from tests.hf.trainer_runs import (
    AUTO,
    SCRIPTS,
    TWO_EPOCHS,
    assert_trains_as,
    run_plain,
    run_unmodified,
)
from tests.processes import REPOSITORY, run

CHECKPOINT = 2


def deepspeed(stage: int, size: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    experts = {"enabled": size > 1, "autoep_size": size}
    return {**AUTO, "zero_optimization": zero, "expert_parallel": experts}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process; two ranks, with one half of the experts each; and runs from a checkpoint of
    those on.
    """
    folder = tmp_path_factory.mktemp("experts")

    def job(name: str, rows: int, **arguments: Any) -> dict[str, Any]:
        own = {"per_device_train_batch_size": rows, "output_dir": str(folder / name)}
        return {"model": "mixtral", "arguments": TWO_EPOCHS | own | arguments, "save": True}

    saving = {"save_strategy": "steps", "save_steps": CHECKPOINT}
    jobs = {
        "two": job("two", 2, deepspeed=deepspeed(3, 2), **saving),
        "resumed": job("resumed", 2, deepspeed=deepspeed(3, 2)),
        "gathered": job("gathered", 2, deepspeed=deepspeed(3, 1)),
        "stage 1": job("stage 1", 2, deepspeed=deepspeed(1, 2)),
    }
    for name in ("resumed", "gathered"):
        jobs[name]["resume"] = str(folder / "two" / f"checkpoint-{CHECKPOINT}")
    (plain,) = run_plain([job("plain", 4, use_cpu=True)], folder / "alone")
    found = run_unmodified([*jobs.values()], folder / "shared", nproc=2)
    reports = {"plain": plain} | dict(zip(jobs, found, strict=True))
    for name, report in reports.items():
        report["folder"] = folder / name
    return reports


@pytest.mark.parametrize("name", ["two", "resumed", "gathered", "stage 1"])
def test_the_trainer_has_the_losses_of_one_process(reports, name):
    """And saves the whole model."""
    assert_trains_as(reports[name], reports["plain"], ranks=2)
    expected = MixtralForCausalLM.from_pretrained(reports["plain"]["folder"]).state_dict()
    model = MixtralForCausalLM.from_pretrained(reports[name]["folder"])
    for key, value in expected.items():
        assert (model.state_dict()[key] - value).abs().max() < 1e-5, key


def test_accelerate_launch_trl_and_a_loop_have_the_losses_of_gathered_experts(tmp_path: Path):
    pytest.importorskip("trl")
    files = {size: tmp_path / f"{size}.json" for size in (1, 2)}
    for size, file in files.items():
        file.write_text(json.dumps(deepspeed(3, size)))
    command = [
        sys.executable, "-m", "zero", "run", "accelerate", "launch", "--use_deepspeed",
        "--deepspeed_config_file", files[2], "--num_processes", 2, "--main_process_port", 0,
        SCRIPTS / "experts.py", files[1], tmp_path,
    ]  # fmt: skip
    done = run([str(word) for word in command], timeout=280, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
