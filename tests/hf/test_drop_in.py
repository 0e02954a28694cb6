"""What users of DeepSpeed do with the Trainer: it works, or the error says what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import fork_ranks

SCRIPT = Path(__file__).parent / "scripts" / "drop_in.py"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By case, what each rank said."""
    done = fork_ranks(SCRIPT, tmp_path_factory.mktemp("out"), nproc=2, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line.split("|") for line in done.stdout.splitlines() if line.count("|") == 2)
    found: dict[str, list[str]] = {}
    for name, _, text in lines:
        found.setdefault(name, []).append(text)
    return found


@pytest.mark.parametrize("model", ["clip", "llava"])
def test_a_model_of_models_that_its_class_builds_is_sharded(said: dict[str, list[str]], model: str):
    first, second = said[model]
    assert first == second and first.startswith("True True")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_run_of_a_trainer_is_refused_and_a_new_trainer_runs(
    said: dict[str, list[str]], stage: int
):
    for text in said[f"twice {stage}"]:
        assert "make a new Trainer with the same model before a second train()" in text


def test_an_optimizer_that_transformers_drops_is_refused(said: dict[str, list[str]]):
    for text in said["optimizers"]:
        assert "transformers drops the SGD that you pass" in text and "create_optimizer" in text


def test_an_overridden_create_optimizer_counts(said: dict[str, list[str]]):
    assert said["create_optimizer"] == ["0.5", "0.5"]
