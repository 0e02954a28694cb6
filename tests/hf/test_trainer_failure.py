"""One rank's exception ends all ranks with that rank's message."""

from __future__ import annotations

from tests.hf.trainer_runs import SCRIPTS, SHIPPED_CONFIG, write_jobs
from tests.processes import torchrun


def test_one_rank_raising_in_a_step_ends_the_job(tmp_path):
    arguments = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "deepspeed": str(SHIPPED_CONFIG),
    }
    jobs = [{"model": "llama", "arguments": arguments, "fail_at": 1}]
    # The failing rank has a thread that never ends, and the other rank waits in a collective. So
    # the time limit tests.
    process = torchrun(
        "-m", "zero", "run", SCRIPTS / "jobs.py", write_jobs(jobs, tmp_path), nproc=2, timeout=90
    )
    assert process.returncode != 0
    assert "[rank 1] RuntimeError: the batch was cursed" in process.stderr
    assert "on_pre_optimizer_step" in process.stderr  # the traceback, too
