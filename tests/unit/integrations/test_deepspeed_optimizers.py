"""DeepSpeed's optimizer classes: their numbers, and what they refuse."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import Adafactor

from tests.releases import needs
from zero.config import load_config
from zero.errors import UsageError
from zero.integrations.deepspeed.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    build_optimizer,
)


def test_lion_against_the_papers_algorithm():
    lr, (fast, slow), decay = 0.1, (0.5, 0.75), 0.5
    ours = nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer = DeepSpeedCPULion([ours], lr=lr, betas=(fast, slow), weight_decay=decay)
    param, momentum = ours.detach().double(), torch.zeros(7).double()
    for step in range(4):
        gradient = torch.linspace(1, -2, 7).double() * (step + 1)
        param = param - lr * (torch.sign(fast * momentum + (1 - fast) * gradient) + decay * param)
        momentum = slow * momentum + (1 - slow) * gradient
        ours.grad = gradient.float()
        optimizer.step()
    torch.testing.assert_close(ours.detach(), param.float())


def test_groups_of_a_torch_optimizer_keep_what_they_say():
    """accelerate calls it with the groups of the user's optimizer and two of its defaults."""
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    user = torch.optim.AdamW(
        [{"params": [first], "lr": 0.5}, {"params": [second], "weight_decay": 0.0}],
        betas=(0.5, 0.6),
    )
    optimizer = DeepSpeedCPUAdam(user.param_groups, lr=1e-3, weight_decay=0.01, adamw_mode=True)
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (0.5, 0.01, (0.5, 0.6)),
        (1e-3, 0.0, (0.5, 0.6)),
    ]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (partial(torch.optim.SGD, lr=0.1), "dampening, momentum, nesterov"),
        (partial(torch.optim.RAdam, lr=0.1), "no amsgrad"),
        (Adafactor, "clip_threshold"),
        (torch.optim.Adafactor, "beta2_decay"),
        (lambda params: pytest.importorskip("schedulefree").AdamWScheduleFree(params), "lr_power"),
        pytest.param(
            lambda params: torch.optim.Muon(params),
            "momentum, nesterov, ns_steps",
            marks=needs("torch", "2.9", "it has no Muon"),
        ),
    ],
)
def test_adam_does_not_take_the_place_of_another_optimizer(make, key):
    """accelerate calls it for any offloaded optimizer."""
    user = make([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(UsageError, match=f"{key}.*set zero_force_ds_cpu_optimizer to false"):
        DeepSpeedCPUAdam(user.param_groups, lr=0.1, weight_decay=0.0, adamw_mode=False)


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (DeepSpeedCPUAdam, {"bias_correction": False}),
        (DeepSpeedCPUAdam, {"fp32_optimizer_states": False}),
        (DeepSpeedCPUAdagrad, {"amsgrad": True}),
        (DeepSpeedCPULion, {"fp32_optimizer_states": False}),
    ],
)
def test_deepspeeds_classes_refuse_what_they_do_not_do(make, setting):
    with pytest.raises(ValueError, match=f"{make.__name__}: {next(iter(setting))}"):
        make([nn.Parameter(torch.ones(2))], **setting)


class Untested(torch.optim.SGD):
    pass


UNTESTED = {"zero_allow_untested_optimizer": False, "zero_optimization": {"stage": 1}}
FORCED = {
    "zero_force_ds_cpu_optimizer": True,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


@pytest.mark.parametrize(
    ("kind", "raw", "key"),
    [
        (torch.optim.SGD, UNTESTED, ""),
        (Untested, UNTESTED, "Untested is untested, and zero_allow_untested_optimizer is false"),
        (Untested, UNTESTED | {"zero_allow_untested_optimizer": True}, ""),
        (DeepSpeedCPUAdam, FORCED, ""),
        (torch.optim.AdamW, FORCED, "is offloaded, and zero_force_ds_cpu_optimizer is true"),
        (torch.optim.AdamW, {"zero_force_ds_cpu_optimizer": True}, ""),
    ],
)
def test_the_configuration_may_rule_an_optimizer_out(kind, raw, key):
    config, given = load_config(raw), partial(kind, lr=0.1)
    if key:
        with pytest.raises(ValueError, match=key):
            build_optimizer(config, given, None, nn.Linear(3, 2))
    else:
        assert type(build_optimizer(config, given, None, nn.Linear(3, 2))) is kind
