"""Optimizer and scheduler sections, "auto" values and the log: a sharded Trainer against a plain
one, step by step.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from tests.hf.trainer_runs import SHIPPED_CONFIG, column, run_own, run_plain, run_unmodified

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

MUON = {
    "lr": 1e-2,
    "adam_lr": 5e-3,
    "momentum": 0.9,
    "weight_decay": "auto",
    "betas": "auto",
    "eps": "auto",
}

SECTIONS: dict[str, dict[str, Any]] = {
    "AdamW+WarmupLR": {
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(ADAM, "auto")},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto",
        "warmup_num_steps": "auto"}},
    },
    "Adam+WarmupDecayLR": {
        "optimizer": {"type": "Adam", "params": {**ADAM, "adam_w_mode": False}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto", "warmup_max_lr": 1e-2, "warmup_num_steps": 3,
                "warmup_type": "linear",
            },
        },
    },
    "neither": {},
    "neither, offloaded": {},
    "neither, compiled": {},
    "AdamW, the Trainer's schedule": {"optimizer": {"type": "AdamW",
    "params": dict.fromkeys(ADAM, "auto")}},
    "the Trainer's optimizer, WarmupLR": {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto",
        "warmup_num_steps": "auto"}},
    },
    "Adafactor": {},
    "schedule-free": {},
    "Muon": {"optimizer": {"type": "Muon", "params": MUON}},
}  # fmt: skip
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
    "neither": None,
    "neither, offloaded": None,
    "neither, compiled": None,
    "AdamW, the Trainer's schedule": {"optimizer": "AdamW", "parameters": ADAM, "factors": LINEAR},
    "Adafactor": None,
    "schedule-free": None,
}
OTHERS = {
    "Adafactor": {"optim": "adafactor"},
    "schedule-free": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
}


def _arguments(name: str) -> dict[str, Any]:
    return ARGUMENTS | OTHERS.get(name, {})


def _config(name: str) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    if "offloaded" in name:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    steps = dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto")
    return {"zero_optimization": zero, **batch, **steps, **SECTIONS[name]}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return the reports of two ranks with 2 samples each in a step, by the name of the
    configuration.
    """
    jobs = []
    for name in SECTIONS:
        arguments = {
            **_arguments(name),
            "per_device_train_batch_size": 2,
            "deepspeed": _config(name),
        }
        if "compiled" in name:
            arguments |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        jobs.append({"model": "llama", "arguments": arguments})
    reports = run_unmodified(jobs, tmp_path_factory.mktemp("sharded"), nproc=2)
    return dict(zip(SECTIONS, reports, strict=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the reports of one process with 4 samples in a step."""
    jobs: list[dict[str, Any]] = []
    for name, reference in REFERENCES.items():
        job = {
            "model": "llama",
            "arguments": {**_arguments(name), "per_device_train_batch_size": 4, "use_cpu": True},
        }
        jobs.append(job | ({"reference": reference} if reference else {}))
    reports = run_plain(jobs, tmp_path_factory.mktemp("plain"))
    return dict(zip(REFERENCES, reports, strict=True))


@pytest.mark.parametrize("name", REFERENCES)
def test_log_is_that_of_a_plain_trainer(name, sharded, plain):
    ours, theirs = sharded[name], plain[name]
    assert (ours["engine"], ours["world_size"]) == ("DeepSpeedEngine", 2)
    assert len(column(ours, "loss")) == STEPS
    # Two processes add in another order than one. Adam amplifies the differences more than SGD.
    assert column(ours, "loss") == pytest.approx(column(theirs, "loss"), rel=1e-4)
    assert column(ours, "grad_norm") == pytest.approx(column(theirs, "grad_norm"), rel=1e-3)
    assert ours["evaluation"]["eval_loss"] == pytest.approx(
        theirs["evaluation"]["eval_loss"], rel=1e-4
    )


@pytest.mark.parametrize(
    "name, factors",
    [
        ("AdamW+WarmupLR", WARMUP_LOG),
        ("Adam+WarmupDecayLR", WARMUP_LINEAR_DECAY),
        ("neither", LINEAR[:-1]),
        ("neither, offloaded", LINEAR[:-1]),
        ("neither, compiled", LINEAR[:-1]),
        ("AdamW, the Trainer's schedule", LINEAR[1:]),
        ("the Trainer's optimizer, WarmupLR", WARMUP_LOG),
        ("Adafactor", LINEAR[:-1]),
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


def test_trainers_optimizer_under_a_configured_schedule_trains(sharded, plain):
    # There is no plain reference: the Trainer's optimizer has two param groups, the plain one has
    # one.
    ours = column(sharded["the Trainer's optimizer, WarmupLR"], "loss")
    assert ours[0] == pytest.approx(column(plain["neither"], "loss")[0], rel=1e-5)
    assert ours[-1] < ours[0] - 0.05


def test_torch_compile_compiles_the_blocks(sharded):
    """Both blocks share one graph for training and one for evaluation."""
    graphs = {name: report["graphs"] for name, report in sharded.items()}
    assert graphs == dict.fromkeys(SECTIONS, 0) | {"neither, compiled": 2}


@HAS_MUON
def test_muon_trains(sharded, plain):
    """tests/parity compares Muon's numbers. transformers has no Muon for a plain run."""
    ours = column(sharded["Muon"], "loss")
    assert ours[0] == pytest.approx(column(plain["neither"], "loss")[0], rel=1e-5)
    assert ours[-1] < ours[0] - 0.05
    assert sharded["Muon"]["config"]["optimizer"]["params"] == MUON | {
        "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-6,
    }  # fmt: skip


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


def test_plain_python_is_a_world_of_one(tmp_path, plain):
    """Train with the shipped configuration, in a script that calls `zero.hf.enable()` and has no
    launcher.
    """
    arguments = {**ARGUMENTS, "per_device_train_batch_size": 4, "deepspeed": str(SHIPPED_CONFIG)}
    (report,) = run_own([{"model": "llama", "arguments": arguments}], tmp_path)
    assert (report["engine"], report["world_size"]) == ("DeepSpeedEngine", 1)
    reference = plain["AdamW+WarmupLR"]
    assert column(report, "loss") == pytest.approx(column(reference, "loss"), rel=1e-4)
    assert column(report, "grad_norm") == pytest.approx(column(reference, "grad_norm"), rel=1e-3)
    assert "auto" not in json.dumps(report["config"])
