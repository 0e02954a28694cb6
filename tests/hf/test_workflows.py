"""Workflows with a Trainer beyond one training, and with accelerate: two ranks, stage 3, against
plain torch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hf.trainer_runs import SCRIPTS
from tests.processes import fork_ranks
from tests.releases import needs

ACCUMULATES = needs(
    "accelerate", "1.9", "accumulate() asks for no_sync() at stage 3, which DeepSpeed refuses"
)


@pytest.mark.parametrize(
    "script", ["workflows.py", pytest.param("accelerate_workflows.py", marks=ACCUMULATES)]
)
def test_a_workflow_is_that_of_plain_torch(script: str, tmp_path: Path) -> None:
    process = fork_ranks("-m", "zero", "run", SCRIPTS / script, tmp_path, nproc=2, timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
