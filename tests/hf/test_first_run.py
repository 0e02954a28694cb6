"""What a user does first: `torchrun run_translation.py` with the shipped configuration, and `zero
run` on a script with a Trainer. Both train, generate, save, resume, and their models can be loaded.

On a GPU these are new processes in the user's environment, and the first tests that run. On a CPU
the same scripts run in forks of a server, which has made the imports."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from tests.accelerator.test_offload import ON_GPU
from tests.hf.trainer_runs import SCRIPTS, SHIPPED_CONFIG, column, write_jobs
from tests.processes import REPOSITORY, Done, fork_ranks, run, torchrun
from tests.tolerance import rounding

SCRIPT = REPOSITORY / "run_translation.py"
LIMIT = 280  # seconds

Start = Callable[..., Done]


def start_on_gpu(*command: object, launched: bool, timeout: float = LIMIT) -> Done:
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    words = [str(word) for word in command]
    if launched:
        return torchrun(*words, nproc=1, env=env, timeout=timeout)
    return run([sys.executable, *words], env=env, timeout=timeout)


def start_on_cpu(*command: object, launched: bool, timeout: float = LIMIT) -> Done:
    return fork_ranks(*map(str, command), nproc=2 * launched, timeout=timeout)


DEVICES = [
    pytest.param(start_on_gpu, id="gpu", marks=ON_GPU),
    pytest.param(start_on_cpu, id="cpu"),
]


def assert_where(results: Path, start: Start) -> None:
    """Whether the Trainer's own count says that memory of a GPU was used."""
    used = json.loads(results.read_text()).get("train_mem_gpu_peaked_delta", 0)
    assert (used > 0) == (start is start_on_gpu)


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.parametrize("start", DEVICES)
def test_the_shipped_command(start, tmp_path):
    output = tmp_path / "out"
    command = [
        SCRIPT, "--deepspeed", SHIPPED_CONFIG, "--output_dir", output, "--bf16",
        "--max_train_samples", 300, "--max_eval_samples", 9, "--max_predict_samples", 13,
        "--predict_with_generate", "--save_strategy", "steps", "--save_steps", 2,
        "--skip_memory_metrics", False,
    ]  # fmt: skip
    for steps in (2, 4):
        resumes = ["--resume_from_checkpoint", True] if steps > 2 else []
        done = start(*command, "--max_steps", steps, *resumes, launched=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((output / "predict_results.json").read_text())["predict_chrf"] >= 0
        assert "eval_loss" in json.loads((output / "eval_results.json").read_text())
        # Two ranks repeat one of 13 sentences, which is neither scored nor written.
        assert (output / "generated_predictions.txt").read_text().count("\n") == 13
        assert done.stdout.count("prediction  ") == 12
        assert done.stdout.rindex(f"reloaded from {output}") > done.stdout.rindex("prediction  ")
        state = json.loads((output / "trainer_state.json").read_text())
        assert state["global_step"] == steps
        assert (output / f"checkpoint-{steps}").is_dir()
        assert_where(output / "train_results.json", start)
        model = AutoModelForSeq2SeqLM.from_pretrained(output)
        assert model.dtype == torch.bfloat16
        assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.parametrize("start", DEVICES)
def test_a_script_with_a_trainer(start, tmp_path):
    arguments = {
        "deepspeed": str(SHIPPED_CONFIG), "max_steps": 4, "save_steps": 2, "logging_steps": 1,
        "learning_rate": 1e-3, "bf16": True, "per_device_train_batch_size": 4, "seed": 5,
        "eval_strategy": "steps", "eval_steps": 2, "predict_with_generate": True,
        "use_cpu": start is start_on_cpu,
    }  # fmt: skip
    losses = []
    for name, resume in (("first", None), ("second", tmp_path / "output" / "checkpoint-2")):
        output = str(tmp_path / "output")
        job = {"model": "t5", "arguments": arguments | {"output_dir": output}, "resume": resume}
        job |= {"predict": True, "save": True, "resume": resume and str(resume)}
        path = write_jobs([job], tmp_path / name)
        done = start("-m", "zero", "run", SCRIPTS / "jobs.py", path, launched=False)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(Path(job["report"]).read_text())
        assert len(report["predictions"]) == 7
        losses.append(column(report, "loss"))
        model = AutoModelForSeq2SeqLM.from_pretrained(output)
        assert all(value.isfinite().all() for value in model.state_dict().values())
    assert losses[1] == pytest.approx(losses[0], rel=rounding(torch.bfloat16, 64, 4))
