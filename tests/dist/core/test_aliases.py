"""Tensors that share memory with a parameter: refused by name, tied parameters aside."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.dist.training import sgd_engine
from tests.processes import run_on
from zero.errors import UsageError


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.two = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).square().mean()


def same_memory(model: Pair) -> None:
    model.two.weight = nn.Parameter(model.one.weight.data)


def transposed(model: Pair) -> None:
    model.two.weight = nn.Parameter(model.one.weight.data.t())


def part(model: Pair) -> None:
    model.two.weight = nn.Parameter(model.one.weight.data[:2])


def buffer(model: Pair) -> None:
    model.register_buffer("rows", model.one.weight.data[1:3])


def cached(model: Pair) -> None:
    model.kept = {"views": [model.one.weight.t()]}


def frozen_twins(model: Pair) -> None:
    same_memory(model)
    model.requires_grad_(False)
    model.three = nn.Linear(4, 4)


def tied(model: Pair) -> None:
    model.two.weight = model.one.weight


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


def listed(model: Pair) -> None:
    model.all = [model.one.weight, model.two.weight]


def recomputed(model: Pair) -> None:
    """torch keeps a tensor under the old name, which shares memory until the first forward."""
    nn.utils.spectral_norm(model.one)
    prune.l1_unstructured(model.two, "weight", 0.5)


REFUSED = {
    same_memory: "parameter 'two.weight' shares the memory of parameter 'one.weight'.*same object",
    transposed: "parameter 'two.weight' shares the memory of parameter 'one.weight'",
    columns: "parameter 'two.weight' shares the memory of parameter 'one.weight'",
    part: "parameter '(two|one).weight' shares the memory of parameter '(one|two).weight'",
    buffer: "buffer 'rows' shares the memory of parameter 'one.weight'.*clone",
    cached: "tensor 'kept' shares the memory of parameter 'one.weight'.*in forward",
}


def is_refused(rank: int, world_size: int, stage: int) -> None:
    for alias, says in REFUSED.items():
        model = Pair()
        alias(model)
        with pytest.raises(UsageError, match=says):
            sgd_engine(model, stage=stage)


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (3, 2)])
def test_shared_memory_is_refused(stage, world_size):
    run_on(world_size, is_refused, stage)


def complex_is_refused(rank: int, world_size: int) -> None:
    model = Pair()
    model.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    with pytest.raises(UsageError, match="'phase' is complex.*view_as_real"):
        sgd_engine(model, stage=2)


def test_complex_parameters_are_refused():
    run_on(1, complex_is_refused)


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


def is_accepted(rank: int, world_size: int) -> None:
    for alias in (frozen_twins, tied, one_allocation, listed, recomputed):
        model = Pair()
        alias(model)
        sgd_engine(model)


def test_what_cannot_come_apart_is_accepted():
    run_on(2, is_accepted)
