"""Ranks that share sequences, layers or experts, or are replicas: the Trainer, unmodified, beside
one process; from a checkpoint on, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoModelForCausalLM

from tests.hf.trainer_runs import (
    AUTO,
    TWO_EPOCHS,
    assert_trains_as,
    column,
    run_plain,
    run_unmodified,
)
from tests.releases import needs

ROWS = 4  # of a micro-batch, over all ranks
CHECKPOINT = 3  # in the middle of the second epoch
MESH = needs("accelerate", "1.12", "its ParallelismConfig does not go with DeepSpeed")
SEQUENCES = needs("transformers", "5.6", "zero's sequence parallelism needs it")
LAYERS = needs("transformers", "5.23", "it does not shard a model that exists by its plan")
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


class Case(NamedTuple):
    """`parts`: how many ranks, or groups of them, have rows of their own. `keys`: of the job.
    `others`: sections with which the run also goes on from the checkpoint.
    """

    ranks: int
    parts: int
    keys: dict[str, int]
    sections: dict[str, Any]
    stage: int = 3
    model: str = "llama"
    others: tuple[dict[str, Any], ...] = ()


CASES = {
    "sequences": (Case(2, 1, {"sequence": 2}, {}), MESH, SEQUENCES),
    "layers": (Case(4, 2, {}, {"tensor_parallel": {"autotp_size": 2}}), LAYERS),
    "layers, accelerate's mesh": (Case(4, 2, {"tensor": 2}, {}, stage=2), MESH, LAYERS),
    "replicas": (Case(4, 4, {"replicas": 2}, {}), MESH),
    "experts": (Case(2, 2, {}, EXPERTS, model="mixtral", others=({},)),),
    "experts, stage 1": (Case(2, 2, {}, EXPERTS, stage=1, model="mixtral"),),
}


def deepspeed(stage: int, sections: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    zero["stage3_param_persistence_threshold"] = 0
    return AUTO | {"zero_optimization": zero} | sections


def job(model: str, output: Path, parts: int, **arguments: Any) -> dict[str, Any]:
    own = {"per_device_train_batch_size": ROWS // parts, "output_dir": str(output)}
    return {"model": model, "arguments": TWO_EPOCHS | own | arguments, "save": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    jobs = {name: job(name, folder / name, 1, use_cpu=True) for name in ("llama", "mixtral")}
    reports = dict(zip(jobs, run_plain([*jobs.values()], folder), strict=True))
    for name, report in reports.items():
        report["weights"] = AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
    return reports


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=marks) for name, (case, *marks) in CASES.items()]
)
def test_the_trainer_has_the_losses_of_one_process(case: Case, plain: dict, tmp_path: Path):
    """And saves the whole model."""
    jobs = []
    for number, sections in enumerate((case.sections, case.sections, *case.others)):
        config = deepspeed(case.stage, sections)
        arguments = {"deepspeed": config} | (
            {} if number else {"save_strategy": "steps", "save_steps": CHECKPOINT}
        )
        made = job(case.model, tmp_path / str(number), case.parts, **arguments) | case.keys
        made["resume"] = str(tmp_path / "0" / f"checkpoint-{CHECKPOINT}") if number else None
        jobs.append(made)
    reports, expected = run_unmodified(jobs, tmp_path, case.ranks), plain[case.model]
    assert max(column(expected, "grad_norm")) > TWO_EPOCHS["max_grad_norm"]  # it clips
    for number, report in enumerate(reports):
        assert_trains_as(report, expected, case.ranks)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(number)).state_dict()
        assert model.keys() == expected["weights"].keys()
        for name, value in expected["weights"].items():
            assert (model[name] - value).abs().max() < 1e-5, name
    for key in ("loss", "grad_norm"):
        assert column(reports[1], key) == column(reports[0], key)
    if "replicas" in case.keys:
        assert 0.5 <= reports[0]["held"] < 0.55, "with paddings"
