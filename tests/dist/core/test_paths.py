"""Ranks that run different submodules: leaf modules let them, and without these the ranks that part
are named.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dist.core.test_own_loops import ROWS, WIDTH, Experts, build, engine_of
from tests.processes import fork_ranks, on_ranks, run_on
from zero import fragments
from zero.integrations.deepspeed.leaf import set_z3_leaf_modules


def assert_gradients(model: nn.Module, reference: nn.Module, ranks: int, step: int) -> None:
    """Assert that they are those of `reference`, whose losses were summed over ranks."""
    for (name, param), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        expected = torch.zeros_like(plain) if plain.grad is None else plain.grad / ranks
        found = fragments.safe_get_full_grad(param)
        assert torch.equal(found, expected), f"{name} in step {step}"


class Mixture(nn.Module):
    """Each call uses some of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        return self.out(sum(self.experts[i](x) for i in which))


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixture() for _ in range(3)])

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, which)
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
        used = [[0, 1] if (part + step) % 2 else [0] for part in range(world_size)]
        batches = [torch.full((ROWS, WIDTH), 0.1 * (step + 1) + part) for part in range(world_size)]
        engine.backward(engine(batches[rank], used[rank]))
        for part in range(world_size):
            reference(batches[part], used[part]).backward()
        assert_gradients(model, reference, world_size, step)
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
