"""Gradients are the same within rounding, with any number of ranks and micro-batches, any padding
and any stage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import fork_ranks
from tests.tolerance import assert_close, rounding

# More than the limits of the two processes that a fixture starts.
pytestmark = pytest.mark.timeout(600)

# Two steps of SGD. About the inner lengths of two layers, the head and the losses, in forward and
# backward.
TERMS, STEPS = 600, 2
CLOSE = rounding(torch.float32, TERMS, STEPS)
SCRIPT = Path(__file__).parent / "scripts" / "steps.py"
TIMEOUT = 240.0

ZERO_3 = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 100,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}
ZERO_1 = {**ZERO_3, "zero_optimization": {"stage": 1}}
# Hooks inside of blocks record the attention, slice by slice.
SLICES = {"activation_checkpointing": {"batch_slices": 2, "trust_slices": True}}
HIDDEN = {
    "hidden_loss_weight": 0.01,
    "attn_relation_weight": 0.1,
    "temperature": 2.0,
    "loss_type": "jsd",
}


def arguments(batch: int, accumulation: int, **others: Any) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        **others,
    }


ONE_RANK = [
    {"name": "1 x 4", "kind": "llama", "arguments": arguments(4, 1, **HIDDEN)},
    {"name": "4 x 1", "kind": "llama", "arguments": arguments(1, 4, **HIDDEN)},
    {
        "name": "padded",
        "kind": "llama",
        "arguments": arguments(4, 1, **HIDDEN, chunk_size=3),
        "pad": 16,
    },
    {"name": "t5, 1 x 4", "kind": "t5", "arguments": arguments(4, 1)},
    {"name": "gpt2, 1 x 4", "kind": "gpt2", "arguments": arguments(4, 1, top_k=5)},
]
TWO_RANKS = [
    {"name": "2 ranks x 2", "kind": "llama", "arguments": arguments(2, 1, **HIDDEN)},
    {
        "name": "2 ranks x 2, stage 3, slices",
        "kind": "llama",
        "arguments": arguments(2, 1, **HIDDEN, deepspeed=ZERO_3 | SLICES),
    },
    {
        "name": "2 ranks x 1 x 2, stage 1",
        "kind": "llama",
        "arguments": arguments(1, 2, **HIDDEN, deepspeed=ZERO_1),
    },
    {
        "name": "t5, 2 ranks x 1 x 2, stage 3",
        "kind": "t5",
        "arguments": arguments(1, 2, deepspeed=ZERO_3),
    },
    {
        "name": "gpt2, 2 ranks x 2, stage 3",
        "kind": "gpt2",
        "arguments": arguments(2, 1, top_k=5, deepspeed=ZERO_3),
    },
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("invariance")
    for jobs, ranks in ((ONE_RANK, 0), (TWO_RANKS, 2)):
        for number, job in enumerate(jobs):
            job["report"] = str(folder / f"{ranks}_{number}.json")
        path = folder / f"jobs{ranks}.json"
        path.write_text(json.dumps(jobs), encoding="utf-8")
        process = fork_ranks(SCRIPT, path, nproc=ranks, timeout=TIMEOUT)
        assert process.returncode == 0, process.stdout + process.stderr
    jobs = {job["name"]: Path(job["report"]) for job in ONE_RANK + TWO_RANKS}
    return {name: json.loads(path.read_text()) | {"path": str(path)} for name, path in jobs.items()}


def weights(report: dict[str, Any]) -> dict[str, Any]:
    return load_file(Path(report["path"] + ".out", "model.safetensors"))


@pytest.mark.parametrize(
    "name, reference",
    [
        ("4 x 1", "1 x 4"),
        ("padded", "1 x 4"),
        ("2 ranks x 2", "1 x 4"),
        ("2 ranks x 2, stage 3, slices", "1 x 4"),
        ("2 ranks x 1 x 2, stage 1", "1 x 4"),
        ("t5, 2 ranks x 1 x 2, stage 3", "t5, 1 x 4"),
        ("gpt2, 2 ranks x 2, stage 3", "gpt2, 1 x 4"),
    ],
)
def test_losses_and_weights_are_the_same(name, reference, reports):
    ours, expected = reports[name], reports[reference]
    for key in ("loss", "ce_loss", "kd_loss", "hidden_loss", "relation_loss"):
        values = [entry[key] for entry in expected["log"] if key in entry]
        assert [entry[key] for entry in ours["log"] if key in entry] == pytest.approx(
            values, rel=CLOSE
        ), key
    for key in (
        "eval_loss",
        "eval_kd_loss",
        "eval_teacher_ce",
        "eval_top1_agreement",
        "eval_tokens",
    ):
        assert ours["evaluation"][key] == pytest.approx(expected["evaluation"][key], rel=CLOSE), key
    ours, expected = weights(ours), weights(expected)
    assert ours.keys() >= expected.keys()
    for key, value in expected.items():
        assert_close(ours[key], value, TERMS, STEPS)


def test_every_log_has_its_steps_and_parts(reports):
    for name, report in reports.items():
        assert sum("loss" in entry for entry in report["log"]) == 2, name
        assert all("kd_loss" in entry for entry in report["log"] if "loss" in entry), name


def test_projections_are_not_exported(reports):
    assert not [key for key in weights(reports["1 x 4"]) if "distillation" in key]


def test_the_teacher_is_sharded_and_never_whole(reports):
    for name in (
        "2 ranks x 2, stage 3, slices",
        "t5, 2 ranks x 1 x 2, stage 3",
        "gpt2, 2 ranks x 2, stage 3",
    ):
        report = reports[name]
        assert (report["engine"], report["teacher"]) == ("DeepSpeedEngine", "DeepSpeedEngine")
        assert 0 < report["peak"] <= sum(report["groups"][-2:]) < sum(report["groups"])
