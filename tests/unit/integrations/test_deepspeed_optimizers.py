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
    FusedAdam,
    FusedLion,
    Lion,
    build_optimizer,
)

OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def trained(make, steps=3):
    param = nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer = make([param])
    for step in range(steps):
        param.grad = torch.linspace(1, -2, 7) * (step + 1)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("decoupled", [True, False])
def test_deepspeeds_adam_has_the_numbers_of_torch(decoupled):
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    expected = trained(partial(torch.optim.AdamW if decoupled else torch.optim.Adam, **settings))
    assert torch.equal(
        trained(partial(DeepSpeedCPUAdam, **settings, adamw_mode=decoupled)), expected
    )
    assert torch.equal(trained(partial(FusedAdam, **settings, adam_w_mode=decoupled)), expected)


def test_deepspeeds_adagrad_has_the_numbers_of_torch():
    settings = {"lr": 0.1, "eps": 1e-6, "weight_decay": 0.3}
    assert torch.equal(
        trained(partial(DeepSpeedCPUAdagrad, **settings)),
        trained(partial(torch.optim.Adagrad, **settings)),
    )


@pytest.mark.parametrize("kind", [Lion, FusedLion, DeepSpeedCPULion])
def test_lion_against_the_papers_algorithm(kind):
    lr, (fast, slow), decay = 0.1, (0.5, 0.75), 0.5
    param, momentum = torch.linspace(-1, 1, 7).double(), torch.zeros(7).double()
    for step in range(4):
        gradient = torch.linspace(1, -2, 7).double() * (step + 1)
        param = param - lr * (torch.sign(fast * momentum + (1 - fast) * gradient) + decay * param)
        momentum = slow * momentum + (1 - slow) * gradient
    ours = trained(partial(kind, lr=lr, betas=(fast, slow), weight_decay=decay), steps=4)
    torch.testing.assert_close(ours, param.float())


def test_lion_runs_a_closure_and_leaves_parameters_without_gradient():
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = Lion([used, unused], lr=0.5)

    def closure():
        loss = used.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2.0
    assert (
        used.tolist() == [0.5, 0.5]
        and unused.tolist() == [1.0, 1.0]
        and unused not in optimizer.state
    )


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
        (FusedAdam, {"bias_correction": False}),
        (DeepSpeedCPUAdam, {"bias_correction": False}),
        (DeepSpeedCPUAdam, {"fp32_optimizer_states": False}),
        (DeepSpeedCPUAdagrad, {"fp32_optimizer_states": False}),
        (DeepSpeedCPUAdagrad, {"amsgrad": True}),
        (DeepSpeedCPULion, {"fp32_optimizer_states": False}),
    ],
)
def test_deepspeeds_classes_refuse_what_they_do_not_do(make, setting):
    with pytest.raises(ValueError, match=f"{make.__name__}: {next(iter(setting))}"):
        make([nn.Parameter(torch.ones(2))], **setting)


def test_an_offloaded_optimizer_can_be_required_to_be_deepspeeds():
    model = nn.Linear(3, 2)
    on_host = load_config({"zero_force_ds_cpu_optimizer": True, **OFFLOADED})
    on_device = load_config({"zero_force_ds_cpu_optimizer": True})
    for given, config in ((torch.optim.AdamW, on_device), (DeepSpeedCPUAdam, on_host)):
        assert type(build_optimizer(config, given, None, model)) is given
    with pytest.raises(
        ValueError, match="AdamW is offloaded, and zero_force_ds_cpu_optimizer is true"
    ):
        build_optimizer(on_host, torch.optim.AdamW, None, model)


def test_the_sum_of_adagrad_begins_where_torchs_does():
    param = nn.Parameter(torch.zeros(2))
    group = {"params": [param], "initial_accumulator_value": 0.1}
    optimizer = build_optimizer(
        load_config({}), torch.optim.Adagrad([group]), None, nn.Linear(1, 1)
    )
    param.grad = torch.full((2,), 0.5)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["sum"], torch.full((2,), 0.25))
