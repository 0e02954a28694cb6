"""Optimizer and scheduler sections, "auto" values and the log: a sharded Trainer against a plain
one, step by step.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from tests.hf.trainer_runs import (
    AUTO,
    SHIPPED_CONFIG,
    assert_trains_as,
    column,
    run_own,
    run_plain,
    run_unmodified,
)

STEPS = 6
ARGUMENTS = {
    "max_steps": STEPS,
    "logging_steps": 1,
    "per_device_eval_batch_size": 4,
    "save_strategy": "no",
    "learning_rate": 1e-2,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "warmup_steps": 3,
    "max_grad_norm": 0.5,
}
ADAM = {"lr": 1e-2, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1}
# Factors of the learning rate after each step, with warmup_num_steps 3 and total_num_steps 6.
# Configured schedules are DeepSpeed's: a step uses the factor that was set after the step before
# it.
WARMUP_LOG = [math.log(1) / math.log(3), math.log(2) / math.log(3), 1, 1, 1, 1]
WARMUP_LINEAR_DECAY = [0, 1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]
# transformers' own linear schedule: the factor in each step, and after the last one.
LINEAR = [0, 1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0]

MUON: dict[str, Any] = {"lr": 1e-2, "adam_lr": 5e-3, "momentum": 0.9}
MUON |= dict.fromkeys(("weight_decay", "betas", "eps"), "auto")

AUTO_ADAM = {"type": "AdamW", "params": dict.fromkeys(ADAM, "auto")}
WARMUP = {
    "type": "WarmupLR",
    "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps"), "auto"),
}
DECAY = {"total_num_steps": "auto", "warmup_max_lr": 1e-2, "warmup_num_steps": 3}
SECTIONS: dict[str, dict[str, Any]] = {
    "AdamW+WarmupLR": {"optimizer": AUTO_ADAM, "scheduler": WARMUP},
    "Adam+WarmupDecayLR": {
        "optimizer": {"type": "Adam", "params": {**ADAM, "adam_w_mode": False}},
        "scheduler": {"type": "WarmupDecayLR", "params": DECAY | {"warmup_type": "linear"}},
    },
    "neither, compiled": {},
    "AdamW, the Trainer's schedule": {"optimizer": AUTO_ADAM},
    "the Trainer's optimizer, WarmupLR": {"scheduler": WARMUP},
    "Muon": {"optimizer": {"type": "Muon", "params": MUON}},
}
if not hasattr(torch.optim, "Muon"):
    del SECTIONS["Muon"]
HAS_MUON = pytest.mark.skipif("Muon" not in SECTIONS, reason="torch has Muon since 2.9")
REFERENCES: dict[str, dict[str, Any] | None] = {
    "AdamW+WarmupLR": {"optimizer": "AdamW", "parameters": ADAM, "factors": [0, *WARMUP_LOG]},
    "Adam+WarmupDecayLR": {
        "optimizer": "Adam",
        "parameters": ADAM,
        "factors": [0, *WARMUP_LINEAR_DECAY],
    },
    "neither, compiled": None,
    "AdamW, the Trainer's schedule": {"optimizer": "AdamW", "parameters": ADAM, "factors": LINEAR},
}


BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
STAGE_3 = {"stage": 3, **dict.fromkeys((*BUCKETS, "stage3_param_persistence_threshold"), "auto")}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return the reports of two ranks with 2 samples each in a step, by the name of the
    configuration.
    """
    jobs = []
    for name in SECTIONS:
        config = {"zero_optimization": STAGE_3, **AUTO, **SECTIONS[name]}
        arguments: dict[str, Any] = ARGUMENTS | {"deepspeed": config}
        arguments |= {"per_device_train_batch_size": 2}
        if "compiled" in name:
            arguments |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        jobs.append({"model": "llama", "arguments": arguments})
    reports = run_unmodified(jobs, tmp_path_factory.mktemp("sharded"), nproc=2)
    return dict(zip(SECTIONS, reports, strict=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the reports of one process with 4 samples in a step."""
    jobs: list[dict[str, Any]] = []
    for reference in REFERENCES.values():
        arguments = ARGUMENTS | {"per_device_train_batch_size": 4, "use_cpu": True}
        job = {"model": "llama", "arguments": arguments}
        jobs.append(job | ({"reference": reference} if reference else {}))
    reports = run_plain(jobs, tmp_path_factory.mktemp("plain"))
    return dict(zip(REFERENCES, reports, strict=True))


@pytest.mark.parametrize("name", REFERENCES)
def test_log_is_that_of_a_plain_trainer(name, sharded, plain):
    assert len(column(sharded[name], "loss")) == STEPS
    # Two processes add in another order than one. Adam amplifies the differences more than SGD.
    assert_trains_as(sharded[name], plain[name], ranks=2, loss=1e-4, norm=1e-3)


@pytest.mark.parametrize(
    "name, factors",
    [
        ("AdamW+WarmupLR", WARMUP_LOG),
        ("Adam+WarmupDecayLR", WARMUP_LINEAR_DECAY),
        ("neither, compiled", LINEAR[:-1]),
        ("AdamW, the Trainer's schedule", LINEAR[1:]),
        ("the Trainer's optimizer, WarmupLR", WARMUP_LOG),
        pytest.param("Muon", LINEAR[1:], marks=HAS_MUON),
    ],
)
def test_learning_rates_in_the_log(name, factors, sharded):
    """The engine steps its scheduler inside of the step, before the Trainer logs.

    The Trainer steps its own later.
    """
    assert column(sharded[name], "learning_rate") == pytest.approx(
        [1e-2 * factor for factor in factors]
    )


@pytest.mark.parametrize(
    "name", ["the Trainer's optimizer, WarmupLR", pytest.param("Muon", marks=HAS_MUON)]
)
def test_what_has_no_plain_reference_trains(name, sharded, plain):
    """The Trainer's optimizer has two param groups, and transformers has no Muon. tests/parity
    compares Muon's numbers.
    """
    ours = column(sharded[name], "loss")
    assert ours[0] == pytest.approx(column(plain["neither, compiled"], "loss")[0], rel=1e-5)
    assert ours[-1] < ours[0] - 0.05


def test_torch_compile_compiles_the_blocks(sharded):
    """Both blocks share one graph for training and one for evaluation."""
    graphs = {name: report["graphs"] for name, report in sharded.items()}
    assert graphs == dict.fromkeys(SECTIONS, 0) | {"neither, compiled": 2}


def test_auto_values_are_filled_in(sharded):
    config = sharded["AdamW+WarmupLR"]["config"]
    assert config["train_batch_size"] == 4
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 1
    assert config["gradient_clipping"] == 0.5
    assert config["optimizer"]["params"] == ADAM
    assert config["scheduler"]["params"] == {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}
    zero = config["zero_optimization"]
    hidden = 32
    assert zero["reduce_bucket_size"] == hidden * hidden
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * hidden * hidden)
    assert zero["stage3_param_persistence_threshold"] == 10 * hidden
    if "Muon" in sharded:
        filled = {"weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-6}
        assert sharded["Muon"]["config"]["optimizer"]["params"] == MUON | filled


def test_plain_python_is_a_world_of_one(tmp_path, plain):
    """Train with the shipped configuration, in a script that calls `zero.hf.enable()` and has no
    launcher.
    """
    arguments = {**ARGUMENTS, "per_device_train_batch_size": 4, "deepspeed": str(SHIPPED_CONFIG)}
    (report,) = run_own([{"model": "llama", "arguments": arguments}], tmp_path)
    assert_trains_as(report, plain["AdamW+WarmupLR"], ranks=1, loss=1e-4, norm=1e-3)
    assert "auto" not in json.dumps(report["config"])
