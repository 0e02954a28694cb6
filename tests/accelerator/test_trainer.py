"""The unpatched Trainer on the simulated accelerator, compared with the CPU.

They are equal within rounding, because norms are summed in parts."""

import json
from pathlib import Path

import pytest

from tests.hf.trainer_runs import AUTO, TIMEOUT, column, run_plain, write_jobs
from tests.processes import fork_ranks

SCRIPT = Path(__file__).with_name("trainer.py")
ARGUMENTS = {
    "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
    "seed": 5,
    "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2,
    "average_tokens_across_devices": False,
}  # fmt: skip
HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


def test_the_trainer_trains_as_without_the_engine(tmp_path):
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    configs = [{"zero_optimization": each, **AUTO} for each in (zero, zero | HOST)]
    jobs = [
        {
            "model": "t5",
            "arguments": {**ARGUMENTS, "per_device_train_batch_size": 2, "deepspeed": config},
            "save": True,
        }
        for config in configs
    ]
    path = write_jobs(jobs, tmp_path / "sharded")
    done = fork_ranks(SCRIPT, path, nproc=2, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(Path(job["report"]).read_text(encoding="utf-8")) for job in jobs]
    arguments = {**ARGUMENTS, "per_device_train_batch_size": 4, "use_cpu": True}
    (plain,) = run_plain([{"model": "t5", "arguments": arguments}], tmp_path / "plain")
    for report in reports:
        for key, allowed in (("loss", 1e-4), ("grad_norm", 1e-3)):
            assert column(report, key) == pytest.approx(column(plain, key), rel=allowed)


def test_the_trainer_goes_on_if_memory_is_not_enough(tmp_path):
    config = {"zero_optimization": {"stage": 3, **HOST}, **AUTO}
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    paths, reports = [], []
    for act in ("explain", "adapt"):
        given = ARGUMENTS | batch | {"deepspeed": config | {"on_out_of_memory": act}}
        given |= {"eval_strategy": "no", "average_tokens_across_devices": True}
        job = {"model": "llama", "arguments": given}
        paths.append(write_jobs([job], tmp_path / act))
        reports.append(Path(job["report"]))
    done = fork_ranks(SCRIPT, paths[0], "0.7", paths[1], nproc=2, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs its batch in 2 slices" in done.stderr
    whole, cut = (json.loads(report.read_text(encoding="utf-8")) for report in reports)
    assert column(cut, "loss") == pytest.approx(column(whole, "loss"), rel=1e-5)
