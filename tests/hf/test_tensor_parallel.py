"""Layers that two ranks share: the Trainer, unmodified, beside one process.

Four ranks: two of them on each batch.
"""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.hf.trainer_runs import AUTO, TWO_EPOCHS, column, run_plain, run_unmodified
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
    of_plain = TWO_EPOCHS | {
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "output_dir": str(folder / "one"),
    }
    plain = run_plain([{"model": "llama", "arguments": of_plain, "save": True}], folder / "plain")
    of_ranks = TWO_EPOCHS | {"per_device_train_batch_size": 2, "deepspeed": DEEPSPEED}
    saving = {
        "output_dir": str(folder / "saved"),
        "save_strategy": "steps",
        "save_steps": CHECKPOINT,
    }
    first = {"model": "llama", "arguments": of_ranks | saving, "save": True}
    resumed = {
        "model": "llama",
        "arguments": dict(of_ranks),
        "resume": str(folder / "saved" / f"checkpoint-{CHECKPOINT}"),
    }
    stage2 = {**AUTO, "zero_optimization": {"stage": 2}}
    second = {"output_dir": str(folder / "second"), "deepspeed": stage2}
    jobs = [
        first,
        resumed,
        {"model": "llama", "tensor": 2, "arguments": of_ranks | second, "save": True},
    ]
    found = plain + run_unmodified(jobs, folder / "shared", nproc=4)
    for report, name in zip(found, ("one", "saved", None, "second"), strict=True):
        report["folder"] = None if name is None else folder / name
    return found


def test_the_trainer_has_the_losses_of_one_process(reports):
    plain, *others, second = reports
    for report in (others[0], second):
        assert report["engine"] == "DeepSpeedEngine" and report["world_size"] == 4
        for key in ("loss", "grad_norm"):
            assert len(column(plain, key)) == 4
            assert column(report, key) == pytest.approx(column(plain, key), rel=1e-6)
        assert report["evaluation"]["eval_loss"] == pytest.approx(
            plain["evaluation"]["eval_loss"], rel=1e-6
        )


def test_the_trainer_resumes(reports):
    for key in ("loss", "grad_norm"):
        assert column(reports[2], key) == column(reports[1], key)


def test_the_trainer_saves_the_whole_model(reports):
    expected = load_file(reports[0]["folder"] / "model.safetensors")
    for report in (reports[1], reports[3]):
        found = dict(LlamaForCausalLM.from_pretrained(report["folder"]).named_parameters())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].shape == value.shape and (found[name] - value).abs().max() < 1e-5, (
                name
            )
