"""torch.compile of each block: the same training as in eager mode, and no new graphs after the
first step.

The backend "aot_eager" runs the operations of the eager model from graphs. So each operation gives
the same bits. If a tensor is used more than once, its gradients may be added in another order."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.dist.toys import toy, toy_batches
from tests.dist.training import Curve, assert_same_weights, ds_config, relative, start, train_zero
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import run_on
from tests.tolerance import rounding

STEPS = 2
# About the sum of the inner lengths in forward and backward of these models.
TERMS = 1000


def section(backend: str | None, **kwargs: Any) -> dict[str, Any]:
    return {
        "compile": {
            "enabled": backend is not None,
            "backend": backend or "inductor",
            "kwargs": kwargs,
        }
    }


def count() -> int:
    """Return the number of graphs compiled in this process so far."""
    return counters["stats"]["unique_graphs"]


def train(model: nn.Module, given: list, config: dict[str, Any]) -> tuple[Curve, list[int]]:
    """Train. Return the curve, and the number of graphs after the first and after the last step."""
    torch._dynamo.reset()
    before = count()
    engine, _ = start(model, config)
    assert engine.is_compiled == config["compile"]["enabled"]
    curve, graphs = train_zero(engine, given[:1]), [count() - before]
    rest = train_zero(engine, given[1:])
    engine.destroy()
    graphs.append(count() - before)
    return Curve(curve.losses + rest.losses, curve.norms + rest.norms, rest.weights), graphs


def of_transformers(name: str, stage: int, checkpointing: bool) -> list:
    found = []
    for backend in (None, "aot_eager"):
        model = build(name)
        model.config.use_cache = False
        if name == "t5":
            model.encoder.block = model.encoder.block[:1]
            model.decoder.block = model.decoder.block[:1]
        if checkpointing:
            # The default before transformers 5.0 is the other kind, whose first pass is another
            # graph, because it records no gradients.
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found.append(
            train(model, batches(name, STEPS), ds_config(stage=stage, **SMALL) | section(backend))
        )
    return found


def of_toys(shared: bool = False, listed: bool = True, **options: Any) -> list:
    """Train toys.

    `shared`: all blocks share one layer `up`, a group of its own. `listed`: the engine finds
    blocks.
    """
    found = []
    for backend in (None, "aot_eager"):
        model = toy(**options)
        for block in model.blocks[1:] if shared else ():
            block.up = model.blocks[0].up
        if not listed:
            model.blocks = nn.Sequential(*model.blocks)
        config = ds_config(stage3_param_persistence_threshold=0) | section(backend)
        found.append(train(model, toy_batches(STEPS), config))
    return found


# Equal blocks share a graph. T5's two kinds of blocks have one each.
MODELS = {"t5": (("t5", 3, False), 2), "llama with checkpoints": (("llama", 3, True), 1)}
TOYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reentrant": {"checkpointing": "reentrant"},
    "shared": {"shared": True},
    "whole model": {"tied": True, "listed": False},
}


def all_of_them(
    rank: int, world_size: int, models: list[tuple], toys: list[dict[str, Any]]
) -> list:
    """Train all in one process: importing the compiler takes longer than compiling."""
    return [
        *(of_transformers(*model) for model in models),
        *(of_toys(**options) for options in toys),
    ]


@pytest.fixture(scope="module")
def trained() -> dict[str, list]:
    """Return for each model the trainings of both ranks, eager and compiled."""
    of_ranks = run_on(
        2, all_of_them, [model for model, _ in MODELS.values()], list(TOYS.values()), timeout=400
    )
    return dict(zip([*MODELS, *TOYS], zip(*of_ranks, strict=True), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_transformers(trained, name):
    for of_rank in trained[name]:
        assert_close(of_rank, MODELS[name][1])


def test_stage_2_in_one_process():
    (found,) = run_on(1, all_of_them, [("gpt2", 2, False)], [], timeout=300)
    assert_close(found[0], 1)


def assert_close(trainings: list, kinds: int) -> None:
    (eager, none), (compiled, graphs) = trainings
    assert none == [0, 0] and graphs == [kinds, kinds]
    for found, expected in zip(compiled.losses, eager.losses, strict=True):
        assert relative(found, expected) <= rounding(torch.float32, TERMS, STEPS)
    assert relative(compiled.norms, eager.norms) <= rounding(torch.float32, TERMS, STEPS)


@pytest.mark.parametrize("name", TOYS)
def test_bit_for_bit_at_stage_3(trained, name):
    """With checkpoints around blocks, with hooks inside of blocks, and with a model that is
    compiled as a whole.
    """
    for (eager, _), (compiled, graphs) in trained[name]:
        assert graphs[0] == graphs[1] > 0
        assert (compiled.losses, compiled.norms) == (eager.losses, eager.norms)
        assert_same_weights(compiled.weights, eager.weights)  # only rank 0 has weights


def inductor(rank: int, world_size: int) -> None:
    eager, compiled = (
        train(
            toy(),
            toy_batches(STEPS),
            ds_config() | section(backend, fullgraph=True),
        )
        for backend in (None, "inductor")
    )
    assert compiled[1] == [1, 1], "all blocks share one graph, which has no hooks in it"
    assert relative(compiled[0].norms, eager[0].norms) <= rounding(torch.float32, TERMS, STEPS)


@pytest.mark.skipif(
    not shutil.which("c++") and not shutil.which("g++"), reason="inductor needs a C++ compiler"
)
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="torch 2.13: inductor's result is NaN with AVX2 for this shape, in plain torch too",
)
def test_inductor():
    run_on(2, inductor, timeout=300)
