"""Layers that two ranks share: the Trainer, unmodified, beside one process.

Four ranks: two of them on each batch.
"""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.hf.trainer_runs import (
    AUTO,
    TWO_EPOCHS,
    assert_trains_as,
    column,
    run_plain,
    run_unmodified,
)
from tests.releases import needs

pytestmark = needs("transformers", "5.23", "it does not shard a model that exists by its plan")

DEEPSPEED = {
    **AUTO,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "tensor_parallel": {"autotp_size": 2},
}
CHECKPOINT = 2


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One process; four ranks; four ranks from a checkpoint of those on; four at stage 2 with
    accelerate's mesh.
    """
    folder = tmp_path_factory.mktemp("tensor")

    def job(name: str, rows: int, **arguments: Any) -> dict[str, Any]:
        own = {"per_device_train_batch_size": rows, "output_dir": str(folder / name)}
        return {"model": "llama", "arguments": TWO_EPOCHS | own | arguments, "save": True}

    saving = {"save_strategy": "steps", "save_steps": CHECKPOINT}
    jobs = [job("saved", 2, deepspeed=DEEPSPEED, **saving), job("resumed", 2, deepspeed=DEEPSPEED)]
    jobs[1]["resume"] = str(folder / "saved" / f"checkpoint-{CHECKPOINT}")
    stage2 = {**AUTO, "zero_optimization": {"stage": 2}}
    jobs.append(job("second", 2, deepspeed=stage2) | {"tensor": 2})
    found = run_plain([job("one", 4, use_cpu=True)], folder / "plain")
    found += run_unmodified(jobs, folder / "shared", nproc=4)
    for report, name in zip(found, ("one", "saved", "resumed", "second"), strict=True):
        report["folder"] = folder / name
    return found


def test_the_trainer_has_the_losses_of_one_process(reports):
    plain, first, _, second = reports
    for report in (first, second):
        assert_trains_as(report, plain, ranks=4)


def test_the_trainer_resumes(reports):
    for key in ("loss", "grad_norm"):
        assert column(reports[2], key) == column(reports[1], key)


def test_the_trainer_saves_the_whole_model(reports):
    expected = load_file(reports[0]["folder"] / "model.safetensors")
    for report in (reports[1], reports[3]):
        found = dict(LlamaForCausalLM.from_pretrained(report["folder"]).named_parameters())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].shape == value.shape
            assert (found[name] - value).abs().max() < 1e-5, name
