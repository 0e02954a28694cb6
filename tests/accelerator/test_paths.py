"""Ranks that diverge, on a backend that matches collectives by their order alone, as NCCL does."""

import re
import time

import pytest
import torch
from torch import nn

import zero
from tests.accelerator import device
from tests.dist.core.test_own_loops import ROWS, WIDTH, Experts, build, engine_of
from tests.processes import run_on
from tests.tolerance import assert_close
from zero.errors import UsageError
from zero.integrations.deepspeed.leaf import set_z3_leaf_modules


def rows() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH, device=zero.comm.world.compute_device())


def on_device(kind: type[nn.Module]) -> nn.Module:
    return build(kind).to(zero.comm.world.compute_device())


def other_experts(rank: int, world_size: int) -> str:
    engine = engine_of(on_device(Experts))
    engine.backward(engine(rows(), 0))
    engine.step()
    before = [group.shard.clone() for group in engine.groups]
    engine.backward(engine(rows(), 1 + rank))
    with pytest.raises(UsageError) as raised:
        engine.step()
    assert all(
        torch.equal(group.shard, shard) for group, shard in zip(engine.groups, before, strict=True)
    )
    return str(raised.value)


def test_no_step_is_taken_with_another_ranks_weights():
    """All experts have one size.

    So nothing fails and nothing waits, but rank 0 computes with rank 1's expert.
    """
    found = run_on(2, other_experts, simulated=True)
    assert found[0] == found[1]
    assert re.search(
        r"all_gather of group 'experts.1', .*first, and all_gather of group 'experts.2', .*other",
        found[0],
    )
    assert "set_z3_leaf_modules" in found[0]


class Leaf(Experts):
    """Uses several experts. `Mixture` marks it as a leaf module."""

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return x + self.out(sum(torch.tanh(self.experts[which](x)) for which in used))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Leaf() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)
        set_z3_leaf_modules(self, [Leaf])

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, used)
        return self.head(x).square().mean()


def in_leaves(rank: int, world_size: int) -> list[torch.Tensor]:
    """On one rank all groups get all of their gradients, on the other rank not. The ranks take
    turns in this."""
    engine = engine_of(on_device(Mixture), watchdog_timeout=20)
    for step in range(6):
        used = [0, 1, 2] if (rank + step // 2) % 2 else [0]
        engine.backward(engine(rows(), used))
        engine.step()
    return [group.shard.cpu() for group in engine.groups]


class Scaled(nn.Module):
    """Its one small parameter is used at the end, and at the beginning too if the caller says
    so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        set_z3_leaf_modules(self, [nn.Linear])

    def forward(self, x: torch.Tensor, at_both_ends: bool) -> torch.Tensor:
        x = x * self.scale if at_both_ends else x
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x * self.scale).square().mean()


def at_both_ends(rank: int, world_size: int) -> list[torch.Tensor]:
    """Rank 0 has the gradient at the beginning of backward, rank 1 at its end."""
    keys = {"stage3_param_persistence_threshold": WIDTH, "watchdog_timeout": 20}
    engine = engine_of(on_device(Scaled), **keys)
    for _ in range(4):
        engine.backward(engine(rows(), rank > 0))
        engine.step()
    return [group.shard.cpu() for group in engine.groups]


@pytest.mark.parametrize("train", [in_leaves, at_both_ends])
def test_reductions_lie_between_the_same_gathers_on_all_ranks(train):
    """Collectives of the simulated device run one after another. So ranks that start them in
    different orders would block."""
    simulated, plain = run_on(2, train, simulated=True), run_on(2, train)
    for found, expected in zip(simulated, plain, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, 2 * 4 * WIDTH + ROWS, steps=6)


def one_rank_goes_on(rank: int, world_size: int) -> None:
    engine = engine_of(on_device(Experts), watchdog_timeout=2)
    if rank == 0:
        time.sleep(60)
    engine(rows(), 0).item()


def test_a_rank_whose_device_waits_for_ever_is_noticed():
    """Rank 1's host waits for its own device, not for another rank."""
    with pytest.raises(RuntimeError, match="ranks wait for each other") as raised:
        run_on(2, one_rank_goes_on, simulated=True)
    assert re.search(r"rank 0 is at .*test_paths.py", str(raised.value))
    assert re.search(r"rank 1 is at .*; its device has not finished for \d+ s", str(raised.value))


def a_collective_fails(rank: int, world_size: int) -> list[str]:
    engine, found = engine_of(on_device(Experts)), []
    for after in range(0, 12, 3):
        device.fail_collective(after)
        with pytest.raises(torch.distributed.DistBackendError, match="as was planned"):
            for _ in range(3):
                engine.backward(engine(rows(), 0))
                engine.step()
        found.append(str(engine.comm.watchdog.position))
    return found


def test_a_collective_that_fails_raises_its_error():
    found = run_on(2, a_collective_fails, simulated=True)
    assert found[0] == found[1] and len(set(found[0])) > 1
