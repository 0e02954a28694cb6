"""accelerate, and frameworks that these tests do not install, by the calls that their loops make.

Losses are compared with plain torch's, and the weights that they save by name and value. TRL's
scripts, which are all that alignment-handbook runs, are in `test_trl.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hf.trainer_runs import SCRIPTS, TIMEOUT
from tests.processes import fork_ranks

STAGES = {
    "OpenRLHF": (2, 3),
    "open-instruct": (2, 3),
    "ms-swift": (3,),
    "accelerate": (3,),
    "diffusers": (2, 3),
}
CASES = [(name, stage) for name, stages in STAGES.items() for stage in stages]


@pytest.mark.parametrize(("framework", "stage"), CASES)
def test_a_loop_trains_as_plain_torch(framework: str, stage: int, tmp_path: Path) -> None:
    script = ("-m", "zero", "run", SCRIPTS / "frameworks.py")
    done = fork_ranks(*script, framework, str(stage), tmp_path, nproc=2, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
