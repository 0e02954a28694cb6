"""bf16 beside DDP with a model in bf16, as DeepSpeed's own tests compare.

DDP's optimizer sees the bf16 weights. The engine has fp32 masters, so both agree bit for bit until
the second step. A model that is given in fp32 keeps its fp32 values in the masters. Its first step
then is plain torch's with fp32 masters, and not DDP's, whose weights were rounded before."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zero
from tests.dist.training import ds_config, take_step
from tests.processes import run_on
from zero.fragments import safe_get_full_grad

WIDTH = 8
LR = 1e-3


class Layers(nn.Module):
    """Several layers, of which one is computed again in backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        first, second, third = self.layers
        hidden = checkpoint(lambda y: torch.relu(second(y)), first(x), use_reentrant=False)
        return third(hidden)


def model():
    torch.manual_seed(42)
    return Layers()


def inputs():
    return torch.randn(2, WIDTH, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))


def one_step(rank, world_size, stage, is_rounded):
    """Gradients and weights after a step: of the engine, of DDP in bf16, and of plain torch with
    fp32 masters.
    """
    wrapped = DistributedDataParallel(model().bfloat16())
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=LR)
    output = wrapped(inputs())
    output.backward(torch.ones_like(output))
    grads_of_ddp = [param.grad.clone() for param in wrapped.parameters()]
    optimizer.step()

    masters = list(model().parameters())
    for master, grad in zip(masters, grads_of_ddp, strict=True):
        master.grad = grad.float()
    take_step(torch.optim.Adam(masters, lr=LR, fused=True))

    given = model().bfloat16() if is_rounded else model()
    config = ds_config(
        stage=stage,
        bf16={"enabled": True},
        optimizer={"type": "Adam", "params": {"lr": LR}},
        stage3_param_persistence_threshold=0,
    )
    engine, *_ = zero.initialize(model=given, config=config)
    output = engine(inputs())
    output.backward(torch.ones_like(output))
    params = list(given.parameters())
    grads = [safe_get_full_grad(param).bfloat16() for param in params]
    engine.step()
    with zero.GatheredParameters(params):
        weights = [param.detach().clone() for param in params]
    of_ddp = [param.detach() for param in wrapped.parameters()]
    of_masters = [master.detach().bfloat16() for master in masters]
    return grads, grads_of_ddp, weights, of_ddp, of_masters


def equal(some, others):
    return all(map(torch.equal, some, others))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_in_bf16_takes_ddps_step(stage):
    for grads, grads_of_ddp, weights, of_ddp, _ in run_on(2, one_step, stage, True):
        assert equal(grads, grads_of_ddp)
        assert equal(weights, of_ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_in_fp32_keeps_its_values_in_the_masters(stage):
    for grads, grads_of_ddp, weights, of_ddp, of_masters in run_on(2, one_step, stage, False):
        assert equal(grads, grads_of_ddp)
        assert equal(weights, of_masters)
        assert not equal(weights, of_ddp), "DDP steps from rounded weights"
