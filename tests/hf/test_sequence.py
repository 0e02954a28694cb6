"""Sequences that two ranks share: the Trainer and TRL's own SFT script, unmodified, beside one
process.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.compatibility.__main__ import SCRIPTS, command, find, read_log, write_inputs
from tests.hf.trainer_runs import AUTO, assert_trains_as, column, run_plain, run_unmodified
from tests.processes import fork_ranks
from tests.releases import needs

# accelerate's ParallelismConfig has `sp_size`, and the Trainer divides batches by it.
pytestmark = [
    needs("accelerate", "1.12", "it has no sequence parallelism"),
    needs("transformers", "5.6", "zero's sequence parallelism needs it"),
]

DEEPSPEED = {**AUTO, "zero_optimization": {"stage": 3}}
# Two epochs of four steps, of two micro-batches of two samples; batches are shuffled.
ARGUMENTS = {
    "num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "max_grad_norm": 0.5, "learning_rate": 1e-3, "save_strategy": "no",
}  # fmt: skip
SHARED_BY_TWO = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}
CHECKPOINT = 6  # in the middle of the second epoch


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One process; two ranks; two ranks from a checkpoint of those on."""
    folder = tmp_path_factory.mktemp("sequence")
    plain = run_plain(
        [{"model": "llama", "arguments": ARGUMENTS | {"use_cpu": True}}], folder / "plain"
    )
    shared = {"model": "llama", "sequence": 2, "arguments": ARGUMENTS | {"deepspeed": DEEPSPEED}}
    saving = {"save_strategy": "steps", "save_steps": CHECKPOINT}
    saving["output_dir"] = str(folder / "saved")
    first = {**shared, "arguments": shared["arguments"] | saving}
    resumed = {**shared, "resume": str(folder / "saved" / f"checkpoint-{CHECKPOINT}")}
    return plain + run_unmodified([first, resumed], folder / "shared", nproc=2)


def test_the_trainer_has_the_losses_of_one_process(reports):
    """In the evaluation each rank has whole sequences."""
    plain, shared, _ = reports
    assert_trains_as(shared, plain, ranks=2)
    assert shared["config"]["train_batch_size"] == 4
    assert max(column(plain, "grad_norm")) > 0.5, "clipping must be at work"


def test_the_trainer_resumes_within_an_epoch(reports):
    _, shared, resumed = reports
    for key in ("loss", "grad_norm"):
        assert column(resumed, key) == column(shared, key)


def test_trl_packs_sequences(tmp_path):
    """Switched on as accelerate's launcher does, by the environment."""
    pytest.importorskip("trl")
    script, data = SCRIPTS["trl/sft"], write_inputs(tmp_path / "data")
    logs, file = [], find(script, [])
    for stage in (None, 3):
        out = tmp_path / f"out{stage}"
        line = command(script, file, data, "full", stage, out)
        # A step has one batch on one process, and one on two that share it.
        line += ["--packing", "--gradient_accumulation_steps", "1"]
        options = {"nproc": 2, "env": SHARED_BY_TWO} if stage else {"nproc": 1}
        if not stage:
            line.append("--use_cpu")
            options["imported"] = "transformers"
        process = fork_ranks(*line, timeout=240, **options)
        assert process.returncode == 0, process.stdout + process.stderr
        logs.append([entry for entry in read_log(out) if "loss" in entry])
    assert len(logs[0]) == 4
    for key in ("loss", "grad_norm"):
        expected, found = ([entry[key] for entry in log] for log in logs)
        assert found == pytest.approx(expected, rel=1e-6)
