"""Reads and writes inside `GatheredParameters` at any moment of a step: as in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import assert_close_to, noise, sgd_engine
from tests.processes import run_on
from tests.tolerance import assert_close

WIDTH, ROWS, STEPS = 8, 4, 3
TERMS = 200


def net() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList(layers)[0], *layers[1:])


def batch(step: int, rank: int) -> torch.Tensor:
    return noise(step, rank, ROWS, WIDTH)


def engine_of(stage: int, **section: object) -> zero.ZeroEngine:
    return sgd_engine(net(), stage=stage, **section)


def same(engine: zero.ZeroEngine, reference: nn.Module, what: object) -> None:
    assert_close_to(engine.module, reference, TERMS, 10 * STEPS, what)


def add(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.add_(0.25)


@torch.no_grad()
def writes(rank: int, world_size: int, stage: int) -> None:
    """After a forward, which may leave a group gathered, and inside of another context."""
    engine, reference = engine_of(stage), net()
    params, last = list(engine.module.parameters()), world_size - 1
    inputs = batch(0, 0)
    engine(inputs)
    with zero.GatheredParameters(params, modifier_rank=last):
        if rank == last:
            add(params)
    add(reference.parameters())
    assert_close(engine(inputs), reference(inputs), TERMS, STEPS, "after a forward")
    with zero.GatheredParameters(params):
        with zero.GatheredParameters(params[:4], modifier_rank=last):
            if rank == last:
                add(params[:4])
        add(list(reference.parameters())[:4])
        same(engine, reference, "inside")
        assert_close(engine(inputs), reference(inputs), TERMS, STEPS, "forward inside")
    assert_close(engine(inputs), reference(inputs), TERMS, STEPS, "after a context")
    same(engine, reference, "after a context")


@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_have_what_one_has_written(stage):
    run_on(2, writes, stage)


Penalty = Callable[[Iterable[nn.Parameter]], torch.Tensor]
PENALTIES: dict[str, Penalty] = {
    "absolute": lambda params: sum(p.abs().sum() for p in params),
    "clamp": lambda params: sum(p.clamp(-0.1, 0.1).sum() for p in params),
    "square": lambda params: sum(p.square().sum() for p in params),
    "view": lambda params: sum(p.view(-1)[2:].pow(3).sum() for p in params),
    "product": lambda params: sum((p * p.detach()).sum() for p in params),
    "matrix": lambda params: sum((p @ p.t()).square().sum() for p in params if p.dim() == 2),
    "norm": lambda params: sum(p.norm() for p in params),
}


def penalized(rank: int, world_size: int, stage: int) -> None:
    for name, penalty in PENALTIES.items():
        for single in (False, True):
            engine, reference = engine_of(stage), net()
            optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
            chosen = slice(0, 1) if single else slice(None)
            for step in range(STEPS):
                params = list(engine.module.parameters())[chosen]
                added = []
                for is_before in (True, False):
                    if is_before == (step == 1):
                        with zero.GatheredParameters(params):
                            added.append(penalty(params))
                    if is_before:
                        loss = engine(batch(step, rank)).square().mean()
                engine.backward(loss + 0.01 * added[0])
                engine.step()
                for each in range(world_size):
                    loss = reference(batch(step, each)).square().mean() / world_size
                    loss.backward()
                (0.01 * penalty(list(reference.parameters())[chosen])).backward()
                optimizer.step()
                optimizer.zero_grad()
            same(engine, reference, (name, single))
            engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_penalty_made_inside(world_size):
    run_on(world_size, penalized, 3)


def open_in_backward(rank: int, world_size: int) -> None:
    for modifier_rank in (None, 0):
        engine, reference = engine_of(3), net()
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(STEPS):
            loss = engine(batch(step, rank)).square().mean()
            with zero.GatheredParameters(engine.module.parameters(), modifier_rank=modifier_rank):
                engine.backward(loss)
            engine.step()
            for each in range(world_size):
                (reference(batch(step, each)).square().mean() / world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
        same(engine, reference, modifier_rank)
        engine.destroy()


def test_backward_inside():
    run_on(2, open_in_backward)


class KeepsView(nn.Linear):
    """Keeps a view of its weight, which shows the weight's values from then on."""

    kept: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = [self.weight.detach().view(-1)]
        return super().forward(x) + 0.1 * self.kept[0][:WIDTH]


def shown_by_views(rank: int, world_size: int) -> None:
    def views() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(KeepsView(WIDTH, WIDTH), nn.Tanh(), KeepsView(WIDTH, WIDTH))

    reference, model = views(), views()
    engine, optimizer = sgd_engine(model), torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(STEPS):
        engine.backward(engine(batch(step, 0)).square().mean())
        engine.step()
        reference(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            with zero.GatheredParameters(model[0].weight, modifier_rank=world_size - 1):
                if rank == world_size - 1:
                    model[0].weight.mul_(0.5)
            with zero.GatheredParameters(model[2].weight):
                pass
            reference[0].weight.mul_(0.5)
            assert_close(engine(batch(step, 0)), reference(batch(step, 0)), TERMS, 10 * STEPS)


def test_views_that_a_module_keeps_show_what_was_written():
    run_on(2, shown_by_views)


def lost(rank: int, world_size: int, single: bool) -> list[str]:
    engine, found = engine_of(3, enable_sanity_checks=True), []
    params = list(engine.module.parameters())
    asked = params[1:2] if single else params
    for write in (lambda: asked[0].data.add_(1.0), lambda: asked[-1].add_(1.0)):
        try:
            with torch.no_grad(), zero.GatheredParameters(asked):
                write()
        except RuntimeError as error:
            found.append(str(error))
    with zero.GatheredParameters(asked, modifier_rank=0):
        asked[0].data.add_(1.0)
    with pytest.raises(ValueError, match=f"modifier_rank is {world_size}"):
        with zero.GatheredParameters(asked, modifier_rank=world_size):
            pass
    if world_size > 1:
        with pytest.raises(ValueError, match="modifier_rank"):
            with zero.GatheredParameters(asked, modifier_rank=rank):
                pass
    return found


@pytest.mark.parametrize("single", [False, True])
def test_a_write_that_would_be_lost_is_named(single):
    for found in run_on(2, lost, single):
        assert len(found) == 2
        assert all("modification of" in each and "modifier_rank" in each for each in found)
