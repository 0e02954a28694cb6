"""The example for Ray Train on a local cluster.

Ray is not in requirements.txt, because it is large.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.processes import REPOSITORY, run

pytest.importorskip("ray", reason='Ray is not installed: pip install "ray[train]"')


def losses(output: Path, workers: int, steps: int) -> dict[int, float]:
    options = ["--workers", workers, "--steps", steps, "--save-every", 2, "--output", output]
    # Without them, Ray gives up on a busy machine, and reports to its makers.
    environment = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "RAY_USAGE_STATS_ENABLED": "0"}
    script = REPOSITORY / "examples" / "ray_train.py"
    done = run([sys.executable, script, *map(str, options)], timeout=540, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(
        rf"step (\d+): loss ([\d.]+) on {workers} workers", done.stdout + done.stderr
    )
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.timeout(1700)
def test_a_run_goes_on_with_fewer_workers(tmp_path: Path):
    first = losses(tmp_path / "run", workers=2, steps=4)
    rest = losses(tmp_path / "run", workers=1, steps=6)
    alone = losses(tmp_path / "alone", workers=1, steps=6)
    assert (list(first), list(rest), list(alone)) == ([1, 2, 3, 4], [5, 6], [1, 2, 3, 4, 5, 6])
    assert first | rest == pytest.approx(alone, rel=1e-5)
