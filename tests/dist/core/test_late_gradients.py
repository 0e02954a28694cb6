"""Ranks that run different submodules, or the same ones in another order: gradients that come late,
on one rank alone, or twice; leaf modules; and without these the ranks that part are named.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from tests.dist.core.test_own_loops import ROWS, WIDTH, Experts, build, engine_of
from tests.dist.toys import toy, toy_batches
from tests.dist.training import assert_gradients, loss_of, sgd_engine
from tests.processes import fork_ranks, on_ranks, run_on
from tests.tolerance import assert_close
from zero.fragments import safe_get_full_grad
from zero.integrations.deepspeed.leaf import set_z3_leaf_modules

SMALL_WIDTH = 4


class Mixture(nn.Module):
    """The first rank uses both experts. The second one has no gradient for the second expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(SMALL_WIDTH, SMALL_WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        y = self.experts[0](x)
        return torch.tanh(y + self.experts[1](x) if uses_all else y)


class Model(nn.Module):
    """Calls its block twice, each time in a checkpoint of its own."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.before = nn.Linear(SMALL_WIDTH, SMALL_WIDTH)
        self.blocks = nn.ModuleList([Mixture()])

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = self.before(x)
        for _ in range(2):
            if self.reentrant:
                x = checkpoint(self.blocks[0], x, uses_all, use_reentrant=True)
            else:
                x = self.blocks[0](x, uses_all)
        return x.square().mean()


@pytest.mark.parametrize(
    ("stage", "reentrant"),
    [
        (1, [True, True]),
        (2, [True, True]),
        (3, [True, True]),
        (1, [True, False]),
        (2, [False, True]),
    ],
)
@on_ranks(2, timeout=60.0)
def test_all_ranks_join_in_the_reduction(rank, world_size, stage, reentrant):
    torch.manual_seed(4)
    model, reference = Model(reentrant[rank]), Model()
    reference.load_state_dict(model.state_dict())
    zero.leaf.set_z3_leaf_modules(model, [Mixture])
    engine = sgd_engine(model, stage=stage, watchdog_timeout=5)
    parts = torch.randn(world_size, 3, SMALL_WIDTH)
    for _ in range(3):
        engine.backward(engine(parts[rank], rank == 0))
    for part in range(world_size):
        (reference(parts[part], part == 0) * 3).backward()
    assert_gradients(model, reference, world_size, 100, 3)
    engine.step()
    engine.destroy()


@on_ranks(2)
def test_a_layer_that_checkpointed_blocks_share_gets_both_gradients(rank, world_size):
    """Each of two checkpointed blocks runs a backward of its own, which gives the layer that they
    share a gradient.
    """
    models = [toy(checkpointing="reentrant") for _ in range(2)]
    for model in models:
        model.blocks[2].up = model.blocks[0].up
    (batch,) = toy_batches(1)
    engine, plain = sgd_engine(models[0]), models[1]
    engine.backward(engine(**batch))
    loss_of(plain(**batch)).backward()
    found = safe_get_full_grad(engine.module.blocks[0].up.weight)
    assert_close(found, plain.blocks[0].up.weight.grad, 100)


# -- leaf modules, and ranks that part


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixture() for _ in range(3)])

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, uses_all)
        return x.square().mean()


@on_ranks(2, timeout=60)
def test_ranks_may_use_different_experts_where_reductions_wait_for_each_other(rank, world_size):
    """One rank uses all experts and another only some, and each reduction must wait for the one
    before it.
    """
    model, reference = build(Mixtures), build(Mixtures)
    set_z3_leaf_modules(model, [Mixture])
    engine = engine_of(model, reduce_bucket_size=1)
    for step in range(4):
        used = [(part + step) % 2 == 1 for part in range(world_size)]
        batches = [
            torch.full((ROWS, SMALL_WIDTH), 0.1 * (step + 1) + part) for part in range(world_size)
        ]
        engine.backward(engine(batches[rank], used[rank]))
        for part in range(world_size):
            reference(batches[part], used[part]).backward()
        assert_gradients(model, reference, world_size, 100)
        engine.zero_grad()
        reference.zero_grad()


DIVERGING = """
import torch, zero
from tests.dist.core.test_own_loops import Experts, engine_of, build
zero.comm.world.init_distributed()
engine = engine_of(build(Experts), watchdog_timeout=6)
engine.backward(engine(torch.ones(2, 8), 1 + engine.global_rank))
"""


def test_ranks_that_part_are_named(tmp_path):
    script = tmp_path / "diverging.py"
    script.write_text(DIVERGING)
    done = fork_ranks(script, nproc=2, timeout=60, imported="zero")
    assert done.returncode == 1
    early, _ = done.stderr.split("zero: ranks wait for each other: no progress for 6 s")
    assert "all ranks wait, at different places" in early and "give the others a blank" in early
    assert all(f"rank {rank} at group 'experts.{rank + 1}" in early for rank in (0, 1)), early
    for rank, expert in ((0, 1), (1, 2)):
        assert f"rank {rank} has waited" in done.stderr
        assert f"experts.{expert}.weight" in done.stderr
    assert "set_z3_leaf_modules" in done.stderr


def unused(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="no module of class Expertz"):
        engine_of(build(Experts), leaf_module={"classes": ["Expertz"]})
    engine = engine_of(build(Experts), 2, ignore_unused_parameters=False)
    with pytest.raises(ValueError, match="ignore_unused_parameters is false") as raised:
        engine.backward(engine(torch.ones(ROWS, WIDTH), 0))
    return str(raised.value)


def test_unused_parameters_and_unknown_leaves_are_refused():
    (message,) = run_on(1, unused)
    assert message.startswith("parameter 'experts.2.weight' got no gradient")
