"""Each row of docs/trainer-features.md: what the Trainer does at stage 3, beside DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hf.features import FEATURES
from tests.hf.trainer_runs import AUTO
from tests.processes import fork_ranks

# The first test of the module waits for two runs of all rows.
pytestmark = pytest.mark.timeout(900)
SCRIPT = Path(__file__).parent / "scripts" / "features.py"
STAGE_3 = AUTO | {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank found, under DDP and on this engine."""
    folder = tmp_path_factory.mktemp("features")
    config = folder / "stage3.json"
    config.write_text(json.dumps(STAGE_3))
    results = {}
    for kind, more, options in (
        ("ddp", [], {"imported": "transformers", "env": {"ACCELERATE_USE_CPU": "true"}}),
        ("zero", [config], {}),
    ):
        (folder / kind).mkdir()
        done = fork_ranks(SCRIPT, folder / kind, *more, nproc=2, timeout=400, **options)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        files = [folder / kind / f"rank{rank}.json" for rank in (0, 1)]
        results[kind] = [json.loads(file.read_text()) for file in files]
    return results


@pytest.mark.parametrize("name", [name for name in FEATURES if not FEATURES[name].ends])
def test_a_row_of_the_table_is_true(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    for ddp, zero in zip(found["ddp"], found["zero"], strict=True):
        assert isinstance(ddp[name], list) and ddp[name], ddp[name]
        if FEATURES[name].refused:
            assert FEATURES[name].refused in zero[name]
        else:
            assert zero[name] == pytest.approx(ddp[name], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in FEATURES if FEATURES[name].ends])
def test_a_job_whose_ranks_run_different_modules_ends(name: str, tmp_path: Path) -> None:
    config = tmp_path / "stage3.json"
    config.write_text(json.dumps(STAGE_3 | {"watchdog_timeout": 4}))
    done = fork_ranks(SCRIPT, tmp_path, config, name, nproc=2, timeout=120)
    assert done.returncode == 1
    assert FEATURES[name].refused in done.stderr
    places = [line for line in done.stderr.splitlines() if line.startswith("  rank ")][:2]
    first, second = (line.partition(" at group ")[2] for line in places)
    assert first and second and first != second, done.stderr[-4000:]
