"""The engine's interface: ways to make an engine and to step it, and what it refuses."""

from __future__ import annotations

import gc
import os
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.dist.comm.test_compression import GRADIENTS
from tests.dist.toys import toy, toy_batches
from tests.dist.training import (
    LR,
    Curve,
    adamw,
    assert_equal,
    assert_same_weights,
    curve_on,
    ds_config,
    sgd_engine,
    start,
    step,
    train_zero,
)
from tests.parity.models import batches, build
from tests.parity.test_whole_tensor import MAKE as MAKE_WHOLE
from tests.processes import on_ranks, run_on
from zero.errors import UsageError
from zero.fragments import safe_get_full_fp32_param

CONFIG = ds_config(stage3_param_persistence_threshold=30)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)


@pytest.mark.parametrize("given_as", ["object", "function"])
@on_ranks(2)
def test_a_users_scheduler_acts_on_the_steps(rank, world_size, given_as):
    model = toy()
    optimizer = adamw([{"params": list(model.parameters())}])
    scheduler = halving if given_as == "function" else halving(optimizer)
    engine, returned, _, lr_scheduler = zero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config_params=CONFIG
    )
    rates = []
    for batch in toy_batches(3):
        rates.append(returned.param_groups[0]["lr"])
        step(engine, [batch])
    assert lr_scheduler.get_last_lr() == [returned.param_groups[0]["lr"]]
    assert rates == [LR, LR / 2, LR / 4]


@on_ranks(2)
def test_a_model_can_be_given_to_another_engine(rank, world_size):
    """A model keeps its values when its engine is destroyed."""
    model = toy()
    engine, _ = start(model, CONFIG)
    step(engine, toy_batches(1))
    before = engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    again, _ = start(model, CONFIG)
    after = again._zero3_consolidated_16bit_state_dict()
    if rank == 0:
        assert_same_weights(after, before)
    step(again, toy_batches(1))
    assert again.get_global_grad_norm() > 0


class Measuring(torch.optim.SGD):
    """Keeps a number in its param groups that depends on the gradients, as Prodigy does."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["d"] = sum(
                float(param.grad.norm()) for param in group["params"] if param.grad is not None
            )


def measured(told: bool | None) -> None:
    model = toy()
    optimizer = Measuring(model.parameters(), lr=0.1)
    engine, *_ = zero.initialize(
        model=model, optimizer=optimizer, config=ds_config(elementwise_optimizer=told)
    )
    step(engine, toy_batches(1))


# What an error says, and the call that raises it.
REFUSED: dict[str, Callable[[zero.ZeroEngine], Any]] = {
    "model is missing": lambda engine: zero.initialize(config=CONFIG),
    "config is missing": lambda engine: zero.initialize(model=toy()),
    "mpu": lambda engine: zero.initialize(model=toy(), mpu=object(), config=CONFIG),
    "configuration": lambda engine: engine.half(),
    "torch.bfloat16": lambda engine: engine.to(torch.bfloat16),
    "meta": lambda engine: engine.to("meta"),
    "scalar tensor": lambda engine: engine.backward(torch.ones(2)),
    "optimizer": lambda engine: zero.initialize(model=toy().requires_grad_(False), config=CONFIG)[
        0
    ].step(),
    "which tensors this rank has (param group 0, d: ": lambda engine: measured(None),
    "Measuring changes 'd' of its param group": lambda engine: measured(True),
}


@on_ranks(2)
def test_what_is_refused_says_what_to_do(rank, world_size):
    engine, _ = start(toy(), CONFIG)
    for says, call in REFUSED.items():
        with pytest.raises(ValueError, match=re.escape(says)):
            call(engine)
    assert engine.to("cpu") is engine.float() is engine.to(torch.float32) is engine


@on_ranks(2)
def test_an_engine_goes_with_its_last_reference(rank, world_size):
    threads = []
    for _ in range(3):
        engine = start(toy(), CONFIG)[0]
        train_zero(engine, toy_batches(1))
        engine = weakref.ref(engine)
        while engine() is not None and gc.collect():
            pass  # the Python object of a tensor may need one more collection
        threads.append(threading.active_count())
    assert engine() is None and threads[-1] == threads[0]


# -- tensors that share memory with a parameter


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.two = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).square().mean()


def frozen_twins(model: Pair) -> None:
    model.two.weight = nn.Parameter(model.one.weight.data)
    model.requires_grad_(False)
    model.three = nn.Linear(4, 4)


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


def shares(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Pair], None]:
    """The second weight is made of the first one."""
    return lambda model: setattr(model.two, "weight", nn.Parameter(change(model.one.weight.data)))


PHASE = nn.Parameter(torch.randn(3, dtype=torch.complex64))
# What is done to the model, and what the error says.
SHARED: list[tuple[Callable[[Pair], Any], str]] = [
    (shares(lambda data: data), "parameter 'two.weight' shares .* 'one.weight'.*same object"),
    (shares(torch.t), "parameter 'two.weight' shares the memory of parameter 'one.weight'"),
    (shares(lambda data: data[:2]), "'(two|one).weight' shares .* '(one|two).weight'"),
    (columns, "parameter 'two.weight' shares the memory of parameter 'one.weight'"),
    (
        lambda model: model.register_buffer("rows", model.one.weight.data[1:3]),
        "buffer 'rows' shares the memory of parameter 'one.weight'.*clone",
    ),
    (
        lambda model: setattr(model, "kept", {"views": [model.one.weight.t()]}),
        "tensor 'kept' shares the memory of parameter 'one.weight'.*in forward",
    ),
    (lambda model: setattr(model, "phase", PHASE), "'phase' is complex.*view_as_real"),
]


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (3, 2)])
@on_ranks()
def test_shared_memory_and_complex_numbers_are_refused(rank, world_size, stage):
    for change, says in SHARED:
        model = Pair()
        change(model)
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
    for change in (frozen_twins, one_allocation):
        model = Pair()
        change(model)
        model.all = [model.one.weight, model.two.weight]
        sgd_engine(model)


# -- the engine's own tensors have their own dtypes:


MAKE = {"AdamW": adamw, "Muon": MAKE_WHOLE["Muon"]}


def trained(
    rank: int, world_size: int, section: dict[str, Any], optimizer: str, default: torch.dtype
) -> Curve:
    """As on machines of two ranks. The weights are read in fp32."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    engine, _ = start(build("llama"), ds_config(**section), make=MAKE[optimizer])
    torch.set_default_dtype(default)
    curve = train_zero(engine, batches("llama", 2))
    curve.weights = {
        name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()
    }
    return curve


@pytest.mark.parametrize(
    ("world_size", "section", "optimizer"),
    [(2, {}, "Muon"), (4, {"mics_shard_size": 2}, "AdamW"), (4, GRADIENTS, "AdamW")],
    ids=["whole tensors", "replicas", "codes between machines"],
)
def test_a_default_dtype_that_scripts_set_changes_nothing(world_size, section, optimizer):
    found, expected = (
        curve_on(world_size, trained, section, optimizer, default)
        for default in (torch.bfloat16, torch.float32)
    )
    assert_equal(found, expected)
