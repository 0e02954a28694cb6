"""Workflows with a Trainer beyond one training: two ranks, stage 3, against plain torch."""

from __future__ import annotations

from pathlib import Path

from tests.hf.trainer_runs import SCRIPTS
from tests.processes import fork_ranks


def test_workflows_are_those_of_plain_torch(tmp_path: Path) -> None:
    script = SCRIPTS / "workflows.py"
    process = fork_ranks("-m", "zero", "run", script, tmp_path, nproc=2, timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
