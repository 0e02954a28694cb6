"""accelerate's ParallelismConfig with two replicas of shards over two ranks trains as plain torch
does.
"""

import json

import pytest

from tests.hf.trainer_runs import SCRIPTS
from tests.processes import fork_ranks
from tests.releases import needs


@needs("accelerate", "1.12", "its ParallelismConfig does not go with DeepSpeed")
def test_the_mesh_of_accelerate_is_the_engines(tmp_path):
    process = fork_ranks("-m", "zero", "run", SCRIPTS / "hybrid.py", tmp_path, nproc=4, timeout=200)
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["losses"] == pytest.approx(report["expected"], rel=1e-6)
    assert report["losses"][-1] < report["losses"][0]
    assert 0.5 <= report["held"] < 0.55, "with paddings"
