"""Workflows with a Trainer beyond one training, and with accelerate: two ranks, stage 3, against
plain torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hf.trainer_runs import SCRIPTS
from tests.processes import fork_ranks
from tests.releases import needs


def report_of(script: str, folder: Path) -> dict[str, Any]:
    process = fork_ranks("-m", "zero", "run", SCRIPTS / script, folder, nproc=2, timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Any]:
    return report_of("workflows.py", tmp_path_factory.mktemp("workflows"))


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-4)


def test_evaluation_and_prediction_without_training(reports):
    report = reports["evaluation_only"]
    assert [report["evaluated"], report["predicted"]] == close([report["expected"]] * 2)
    assert report["same_tokens"] and not report["optimizer"]
    assert report["held"] == pytest.approx(0.5, abs=0.01)


def test_a_batch_size_that_fits_is_found(reports):
    report = reports["batch_size_is_found"]
    assert report["batch_size"] == 2
    assert report["losses"][0] > report["losses"][-1]


def test_random_numbers_go_on_as_in_plain_torch(reports):
    report = reports["random_numbers"]
    assert report["loaded"] == report["plain"]


@needs("transformers", "5.23", "it names the weights of these models otherwise")
@pytest.mark.parametrize("name", ["bert", "llava"])
def test_names_and_values_of_saved_weights_are_those_of_a_plain_model(reports, name):
    """transformers gives some models' weights other names in files than in modules."""
    assert reports[f"saved_names_{name}"] == {"missing": [], "others": [], "differing": []}


def test_a_sharded_checkpoint_is_loaded_into_shards(reports):
    report = reports["sharded_checkpoint"]
    assert report["zero3"] and report["files"] > 5
    assert report["differing"] == []
    assert report["held"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("name", ["clip", "llava"])
def test_a_model_of_models_that_its_class_builds_is_sharded_and_drawn(reports, name):
    assert len(reports[f"built_{name}"]) > 10 and min(reports[f"built_{name}"]) > 1e-3


@needs("accelerate", "1.9", "accumulate() asks for no_sync() at stage 3, which DeepSpeed refuses")
def test_accelerate_plugins_in_turn_and_dummies(tmp_path):
    """A student with configured optimizer and schedule, two micro-batches a step, and a frozen
    teacher.
    """
    report = report_of("accelerate_workflows.py", tmp_path)
    assert report["losses"] == close(report["expected"])
    assert report["rates"] == [0.0] + [1e-2] * 4
    assert report["steps"] == 5
    assert report["teacher_changed"] == [] and not report["teacher_optimizer"]
    assert report["held"] == pytest.approx([0.5, 0.5], abs=0.01)
