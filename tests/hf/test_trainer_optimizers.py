"""Optimizer and scheduler sections, "auto" values and the log: a sharded Trainer against a plain
one, step by step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from tests.hf.trainer_runs import (
    AUTO,
    assert_trains_as,
    column,
    run_plain,
    run_unmodified,
)

ARGUMENTS = {
    "max_steps": 6, "logging_steps": 1, "per_device_eval_batch_size": 4, "save_strategy": "no",
    "learning_rate": 1e-2, "adam_beta2": 0.98, "adam_epsilon": 1e-6, "weight_decay": 0.1,
    "warmup_steps": 3, "max_grad_norm": 0.5,
}  # fmt: skip
ADAM = {"lr": 1e-2, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1}
# Factors of the learning rate. WarmupLR with warmup_num_steps 3 is DeepSpeed's: a step uses the
# factor that was set after the step before it. transformers' own schedule over 6 steps has a factor
# for each step, and logs that of the next one.
LOG = [math.log(1) / math.log(3), math.log(2) / math.log(3), 1, 1, 1, 1]
DECAY = [0, 1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]
LINEAR = [*DECAY[1:], 0]

AUTO_ADAM = {"type": "AdamW", "params": dict.fromkeys(ADAM, "auto")}
TIMES = dict.fromkeys(("warmup_max_lr", "warmup_num_steps"), "auto")
AUTO_WARMUP = {"type": "WarmupLR", "params": TIMES}
MUON: dict[str, Any] = {"lr": 1e-2, "adam_lr": 5e-3, "momentum": 0.9}
MUON |= dict.fromkeys(("weight_decay", "betas", "eps"), "auto")


class Case(NamedTuple):
    """`logged`: factors of the learning rate. `compares`: with torch's AdamW in a plain run."""

    logged: list[float]
    sections: dict[str, Any]
    compares: bool = True


CASES = {
    "AdamW+WarmupLR": Case(LOG, {"optimizer": AUTO_ADAM, "scheduler": AUTO_WARMUP}),
    "AdamW, the Trainer's schedule": Case(LINEAR, {"optimizer": AUTO_ADAM}),
    "the Trainer's optimizer, WarmupLR": Case(LOG, {"scheduler": AUTO_WARMUP}, False),
}
if hasattr(torch.optim, "Muon"):  # since 2.9; tests/parity compares its numbers
    CASES["Muon"] = Case(LINEAR, {"optimizer": {"type": "Muon", "params": MUON}}, False)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return the reports of two ranks with 2 samples each in a step."""
    jobs = []
    for case in CASES.values():
        config = {"zero_optimization": {"stage": 3}, **AUTO, **case.sections}
        arguments = ARGUMENTS | {"deepspeed": config, "per_device_train_batch_size": 2}
        jobs.append({"model": "llama", "arguments": arguments})
    reports = run_unmodified(jobs, tmp_path_factory.mktemp("sharded"), nproc=2)
    return dict(zip(CASES, reports, strict=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the reports of one process with 4 samples in a step."""
    jobs = {}
    for name, case in CASES.items():
        if case.compares:
            arguments = ARGUMENTS | {"per_device_train_batch_size": 4, "use_cpu": True}
            factors = DECAY if case.logged is LINEAR else [0, *case.logged]
            reference = {"parameters": ADAM, "factors": factors}
            jobs[name] = {"model": "llama", "arguments": arguments, "reference": reference}
    reports = run_plain([*jobs.values()], tmp_path_factory.mktemp("plain"))
    return dict(zip(jobs, reports, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_log_is_that_of_a_plain_trainer(name, sharded, plain):
    report, (logged, _, compares) = sharded[name], CASES[name]
    rates = [1e-2 * factor for factor in logged]
    assert column(report, "learning_rate") == pytest.approx(rates)
    if compares:
        # Two processes add in another order than one. Adam amplifies the differences.
        assert_trains_as(report, plain[name], ranks=2, loss=1e-4, norm=1e-3)
    else:
        losses = column(report, "loss")
        assert losses[-1] < losses[0] - 0.05


def test_auto_values_are_filled_in(sharded):
    config = sharded["AdamW+WarmupLR"]["config"]
    assert (config["train_batch_size"], config["gradient_clipping"]) == (4, 0.5)
    assert config["optimizer"]["params"] == ADAM
    assert config["scheduler"]["params"] == {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}
    if "Muon" in sharded:
        filled = {"weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-6}
        assert sharded["Muon"]["config"]["optimizer"]["params"] == MUON | filled
