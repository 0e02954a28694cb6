"""Tensors that share memory with a parameter: refused by name, with what to do. The hunt has more
of them, and tied parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dist.training import sgd_engine
from tests.processes import on_ranks, run_on
from zero.errors import UsageError


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.two = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).square().mean()


def part(model: Pair) -> None:
    model.two.weight = nn.Parameter(model.one.weight.data[:2])


def buffer(model: Pair) -> None:
    model.register_buffer("rows", model.one.weight.data[1:3])


def cached(model: Pair) -> None:
    model.kept = {"views": [model.one.weight.t()]}


def one_allocation(model: Pair) -> None:
    """As safetensors and recurrent layers do: disjoint parts of one storage."""
    whole = torch.randn(8, 4)
    model.one.weight = nn.Parameter(whole[:4])
    model.two.weight = nn.Parameter(whole[4:])


def columns(model: Pair) -> None:
    """Parts of one matrix, whose rows lie among each other."""
    one, two = torch.randn(4, 8).chunk(2, dim=1)
    model.one.weight = nn.Parameter(one)
    model.two.weight = nn.Parameter(two)


REFUSED = {
    columns: "parameter 'two.weight' shares the memory of parameter 'one.weight'.*same object",
    part: "parameter '(two|one).weight' shares the memory of parameter '(one|two).weight'",
    buffer: "buffer 'rows' shares the memory of parameter 'one.weight'.*clone",
    cached: "tensor 'kept' shares the memory of parameter 'one.weight'.*in forward",
}


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (3, 2)])
@on_ranks()
def test_shared_memory_is_refused(rank, world_size, stage):
    for alias, says in REFUSED.items():
        model = Pair()
        alias(model)
        with pytest.raises(UsageError, match=says):
            sgd_engine(model, stage=stage)


def quantized_is_refused(rank: int, world_size: int) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    model[0].weight.requires_grad_()
    with pytest.raises(UsageError, match=r"'0\.weight' is a \w+, whose values are in other"):
        sgd_engine(model)


def test_trained_weights_that_torchao_has_quantized_are_refused_by_name():
    pytest.importorskip("torchao")
    run_on(1, quantized_is_refused)


@on_ranks(2)
def test_what_cannot_come_apart_is_accepted(rank, world_size):
    model = Pair()
    one_allocation(model)
    model.all = [model.one.weight, model.two.weight]
    sgd_engine(model)
