"""torch.compile of each block: the training of the eager model at every stage, with no new graphs after the first step.

The backend "aot_eager" runs the operations of the eager model from graphs made ahead of time. So each operation has its
bits. Where a tensor is used more than once, its gradients may be added in another order.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.dist.toys import Toy, toy, toy_batches
from tests.dist.training import Curve, assert_same_weights, ds_config, relative, start, train_zero
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import run_on
from tests.tolerance import rounding

STEPS = 3
# Inner lengths along forward and backward of these models, about.
TERMS = 1000
# Inductor then needs no pool of processes that compile.
ONE_THREAD = {"compile_threads": 1}


def section(backend: str | None, **kwargs: Any) -> dict[str, Any]:
    return {"compile": {"enabled": backend is not None, "backend": backend or "inductor", "kwargs": kwargs}}


def count() -> int:
    """Graphs that were compiled in this process so far."""
    return counters["stats"]["unique_graphs"]


def train(model: nn.Module, given: list, config: dict[str, Any]) -> tuple[Curve, list[int]]:
    """A training, and the number of graphs after its first step and after its last one."""
    torch._dynamo.reset()
    before = count()
    engine, _ = start(model, config)
    assert engine.is_compiled == config["compile"]["enabled"]
    curve, graphs = train_zero(engine, given[:1]), [count() - before]
    rest = train_zero(engine, given[1:])
    engine.destroy()
    graphs.append(count() - before)
    return Curve(curve.losses + rest.losses, curve.norms + rest.norms, rest.weights), graphs


def of_transformers(rank: int, world_size: int, name: str, stage: int, checkpointing: bool) -> list:
    found = []
    for backend in (None, "aot_eager"):
        model = build(name)
        model.config.use_cache = False
        if name == "t5":
            model.encoder.block, model.decoder.block = model.encoder.block[:1], model.decoder.block[:1]
        if checkpointing:
            model.gradient_checkpointing_enable()
        config = ds_config(stage=stage, **SMALL) | section(backend)
        found.append(train(model, batches(name, STEPS), config))
    return found


# Equal blocks share a graph. T5's two kinds of blocks have one each.
@pytest.mark.parametrize(
    ("name", "stage", "ranks", "checkpointing", "kinds"),
    [("t5", 3, 2, False, 2), ("gpt2", 2, 2, False, 1), ("llama", 3, 1, False, 1), ("llama", 3, 2, True, 1)],
)
def test_blocks_of_transformers(name, stage, ranks, checkpointing, kinds):
    for (eager, none), (compiled, graphs) in run_on(ranks, of_transformers, name, stage, checkpointing, timeout=300):
        assert none == [0, 0] and graphs == [kinds, kinds]
        for found, expected in zip(compiled.losses, eager.losses, strict=True):
            assert relative(found, expected) <= rounding(torch.float32, TERMS, STEPS)
        assert relative(compiled.norms, eager.norms) <= rounding(torch.float32, TERMS, STEPS)


def of_toys(rank: int, world_size: int, options: dict[str, Any], changes: dict[str, Any], compiled: dict) -> list:
    found = []
    for each in (section(None), compiled):
        model = toy(**options)
        if changes.get("shared"):
            share(model)
        if changes.get("no list"):
            model.blocks = nn.Sequential(*model.blocks)
        found.append(train(model, toy_batches(STEPS), ds_config(stage3_param_persistence_threshold=0) | each))
    return found


def share(model: Toy) -> None:
    """All blocks have one `up`: its unit is gathered by hooks inside of the compiled blocks."""
    for block in model.blocks[1:]:
        block.up = model.blocks[0].up


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"checkpointing": "reentrant"}, {}),
        ({"checkpointing": "non-reentrant"}, {}),
        ({}, {"shared": True}),
        ({"tied": True}, {"no list": True}),
    ],
    ids=["plain", "reentrant", "non-reentrant", "shared", "whole model"],
)
def test_bit_for_bit_at_stage_3(options, changes):
    """With checkpoints around blocks, with hooks inside of them, and a model without blocks, compiled as a whole."""
    for (eager, _), (compiled, graphs) in run_on(2, of_toys, options, changes, section("aot_eager"), timeout=300):
        assert graphs[0] == graphs[1] > 0
        assert (compiled.losses, compiled.norms) == (eager.losses, eager.norms)
        assert_same_weights(compiled.weights, eager.weights)  # rank 0 alone has them


def inductor(rank: int, world_size: int) -> None:
    eager, compiled = (
        train(toy(), toy_batches(STEPS), ds_config() | section(backend, fullgraph=True, options=ONE_THREAD))
        for backend in (None, "inductor")
    )
    assert compiled[1] == [1, 1], "the hooks must stay outside of the one graph of all blocks"
    assert relative(compiled[0].norms, eager[0].norms) <= rounding(torch.float32, TERMS, STEPS)


@pytest.mark.skipif(not shutil.which("c++") and not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor():
    run_on(2, inductor, timeout=300)
