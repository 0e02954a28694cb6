"""Which optimizers the kernel for Adam on host memory serves."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from zero.integrations.deepspeed.optimizers import DeepSpeedCPUAdam, FusedAdam, Lion
from zero.optim import adam_cpu


class Derived(torch.optim.AdamW):
    """A subclass may do more than its base class."""


def made(kind=torch.optim.AdamW, **settings):
    return kind([torch.nn.Parameter(torch.ones(2))], **settings)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam])
def test_plain_adam_is_served_also_under_a_scheduler(kind):
    optimizer = made(kind, lr=0.1)
    assert adam_cpu.serves(optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert adam_cpu.serves(optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [
        made(Derived),
        made(Lion),
        made(amsgrad=True),
        made(maximize=True),
        made(capturable=True),
        made(lr=torch.tensor(0.1)),
        made(betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=False),
    ],
)
def test_others_are_not(optimizer):
    assert not adam_cpu.serves(optimizer)


def test_a_group_of_its_own_kind_is_not_served():
    optimizer = made()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "maximize": True})
    assert not adam_cpu.serves(optimizer)


def test_steps_that_somebody_listens_to_are_not_served():
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = made()
        handle = getattr(optimizer, register)(lambda *args: None)
        assert not adam_cpu.serves(optimizer)
        handle.remove()
        assert adam_cpu.serves(optimizer)
    handle = register_optimizer_step_post_hook(lambda *args: None)
    assert not adam_cpu.serves(optimizer)
    handle.remove()
    optimizer.step = lambda closure=None: None
    assert not adam_cpu.serves(optimizer)
