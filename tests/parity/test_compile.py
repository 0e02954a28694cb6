"""torch.compile of each block: the same training as in eager mode, and no new graphs after the
first step.

The backend "aot_eager" runs the operations of the eager model from graphs. So each operation gives
the same bits. If a tensor is used more than once, its gradients may be added in another order."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
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


def of_transformers(name: str) -> Any:
    model: Any = build(name)
    model.config.use_cache = False
    if name == "t5":
        model.encoder.block, model.decoder.block = model.encoder.block[:1], model.decoder.block[:1]
    if name == "llama":
        # The default before transformers 5.0 is the other kind, whose first pass is another graph,
        # because it records no gradients.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def toys(shared: bool = False, listed: bool = True, **options: Any) -> nn.Module:
    """`shared`: all blocks share one layer `up`, a group of its own. `listed`: the engine finds
    blocks."""
    model = toy(**options)
    for block in model.blocks[1:] if shared else ():
        block.up = model.blocks[0].up
    if not listed:
        model.blocks = nn.Sequential(*model.blocks)
    return model


WHOLE = {"stage3_param_persistence_threshold": 0}
SLICES = {"activation_checkpointing": {"batch_slices": 3, "trust_slices": True}}
# What builds a model, keys, and the number of graphs; None: bit for bit.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int | None]] = {
    # Equal blocks share a graph. T5's two kinds of blocks have one each.
    "t5": (partial(of_transformers, "t5"), SMALL, 2),
    "llama": (partial(of_transformers, "llama"), SMALL, 1),
    "gpt2": (partial(of_transformers, "gpt2"), SMALL | {"stage": 2}, 1),
    "toys": (toys, WHOLE, None),
    "persistent": (toys, {}, None),
    "reentrant": (partial(toys, checkpointing="reentrant"), WHOLE, None),
    "shared": (partial(toys, shared=True), WHOLE, None),
    "whole model": (partial(toys, tied=True, listed=False), WHOLE, None),
    "slices": (toys, WHOLE | SLICES, None),
}


def trained(rank: int, world_size: int, case: str, backend: str, **kwargs: Any) -> list:
    """In eager mode and compiled: the curve, and the numbers of graphs after the first and after
    the last step."""
    make, keys, _ = CASES[case]
    data, found = (
        batches(case, STEPS) if case in ("t5", "llama", "gpt2") else toy_batches(STEPS),
        [],
    )
    for enabled in (False, True):
        torch._dynamo.reset()
        before = counters["stats"]["unique_graphs"]
        section = {"enabled": enabled, "backend": backend, "kwargs": kwargs}
        engine, _ = start(make(), ds_config(compile=section, **keys))
        assert engine.is_compiled == enabled
        first = train_zero(engine, data[:1])
        graphs = [counters["stats"]["unique_graphs"] - before]
        rest = train_zero(engine, data[1:])
        graphs.append(counters["stats"]["unique_graphs"] - before)
        engine.destroy()
        curve = Curve(first.losses + rest.losses, first.norms + rest.norms, rest.weights)
        found.append((curve, graphs))
    return found


@pytest.mark.parametrize("case", CASES)
def test_compiled_blocks_train_alike(case):
    """With checkpoints around blocks, with hooks and slices inside of them, and with a model that
    is compiled as a whole."""
    kinds = CASES[case][2]
    for (eager, none), (compiled, graphs) in run_on(2, trained, case, "aot_eager", timeout=300):
        assert none == [0, 0] and graphs[0] == graphs[1] == (kinds or graphs[0]) > 0
        if kinds is None:
            assert (compiled.losses, compiled.norms) == (eager.losses, eager.norms)
            assert_same_weights(compiled.weights, eager.weights)  # only rank 0 has weights
        for found, expected in zip(compiled.losses, eager.losses, strict=True):
            assert relative(found, expected) <= rounding(torch.float32, TERMS, STEPS)
        assert relative(compiled.norms, eager.norms) <= rounding(torch.float32, TERMS, STEPS)


def by_inductor(rank: int, world_size: int) -> None:
    runs = trained(rank, world_size, "persistent", "inductor", fullgraph=True)
    (eager, _), (compiled, graphs) = runs
    assert graphs == [1, 1], "all blocks share one graph, which has no hooks in it"
    assert relative(compiled.norms, eager.norms) <= rounding(torch.float32, TERMS, STEPS)


@pytest.mark.skipif(
    not shutil.which("c++") and not shutil.which("g++"), reason="inductor needs a C++ compiler"
)
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="torch 2.13: inductor's result is NaN with AVX2 for this shape, in plain torch too",
)
def test_inductor():
    run_on(2, by_inductor, timeout=300)
