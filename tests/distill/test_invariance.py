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

from tests.hf.trainer_runs import AUTO
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
    **AUTO,
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
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    return sizes | others


# By name: the number of ranks, the model, the arguments and to what multiple batches are padded.
JOBS: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "1 x 4": (0, "llama", arguments(4, 1, **HIDDEN), 1),
    "4 x 1": (0, "llama", arguments(1, 4, **HIDDEN), 1),
    "padded": (0, "llama", arguments(4, 1, **HIDDEN, chunk_size=3), 16),
    "t5, 1 x 4": (0, "t5", arguments(4, 1), 1),
    "gpt2, 1 x 4": (0, "gpt2", arguments(4, 1, top_k=5), 1),
    "2 ranks x 2": (2, "llama", arguments(2, 1, **HIDDEN), 1),
    "2 ranks x 2, stage 3, slices": (
        2, "llama", arguments(2, 1, **HIDDEN, deepspeed=ZERO_3 | SLICES), 1,
    ),
    "2 ranks x 1 x 2, stage 1": (2, "llama", arguments(1, 2, **HIDDEN, deepspeed=ZERO_1), 1),
    "t5, 2 ranks x 1 x 2, stage 3": (2, "t5", arguments(1, 2, deepspeed=ZERO_3), 1),
    "gpt2, 2 ranks x 2, stage 3": (2, "gpt2", arguments(2, 1, top_k=5, deepspeed=ZERO_3), 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("invariance")
    for ranks in (0, 2):
        path = folder / f"jobs{ranks}.json"
        jobs = [
            {"kind": kind, "arguments": given, "pad": pad, "report": str(folder / name)}
            for name, (on, kind, given, pad) in JOBS.items()
            if on == ranks
        ]
        path.write_text(json.dumps(jobs), encoding="utf-8")
        process = fork_ranks(SCRIPT, path, nproc=ranks, timeout=TIMEOUT)
        assert process.returncode == 0, process.stdout + process.stderr
    paths = {name: folder / name for name in JOBS}
    return {name: json.loads(path.read_text()) | {"path": path} for name, path in paths.items()}


def weights(report: dict[str, Any]) -> dict[str, Any]:
    return load_file(Path(f"{report['path']}.out", "model.safetensors"))


@pytest.mark.parametrize("name", [name for name in JOBS if not name.endswith("1 x 4")])
def test_losses_and_weights_are_the_same(name, reports):
    kind = JOBS[name][1]
    reference = "1 x 4" if kind == "llama" else f"{kind}, 1 x 4"
    ours, expected = reports[name], reports[reference]
    for key in ("loss", "ce_loss", "kd_loss", "hidden_loss", "relation_loss"):
        values = [entry[key] for entry in expected["log"] if key in entry]
        found = [entry[key] for entry in ours["log"] if key in entry]
        assert len(found) == STEPS or key not in ("loss", "kd_loss")
        assert found == pytest.approx(values, rel=CLOSE), key
    for key in ("loss", "kd_loss", "teacher_ce", "top1_agreement", "tokens"):
        found, value = (each["evaluation"][f"eval_{key}"] for each in (ours, expected))
        assert found == pytest.approx(value, rel=CLOSE), key
    ours, expected = weights(ours), weights(expected)
    assert ours.keys() >= expected.keys()
    for key, value in expected.items():
        assert_close(ours[key], value, TERMS, STEPS)


def test_projections_are_not_exported(reports):
    assert not [key for key in weights(reports["1 x 4"]) if "distillation" in key]


def test_the_teacher_is_sharded_and_never_whole(reports):
    for report in (reports[name] for name in JOBS if "stage 3" in name):
        assert (report["engine"], report["teacher"]) == ("DeepSpeedEngine", "DeepSpeedEngine")
        assert 0 < report["peak"] <= sum(report["groups"][-2:]) < sum(report["groups"])
