"""Own training loops:

`loss.backward()`, several forwards, reads outside of modules, `zero.fragments`, generation.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import sgd_engine
from tests.processes import on_ranks, run_on
from tests.tolerance import assert_close
from zero import fragments
from zero.errors import UsageError

WIDTH, ROWS, LR = 8, 4, 1e-2
# The inner lengths of two layers, forward and backward, and the sums over rows and micro-batches.
TERMS = 4 * WIDTH + 4 * ROWS


class Tied(nn.Module):
    """Reads the embedding's weight outside of the embedding's call.

    Its module `scale` returns a parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = Scale()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.layer(self.embed(x))).to(self.embed.weight.dtype) * self.scale(x)
        return nn.functional.cross_entropy(hidden @ self.embed.weight.t(), y)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((WIDTH,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value


class Experts(nn.Module):
    """Each call uses one expert. The list `experts` has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.out(torch.tanh(self.experts[which](x))).square().mean()


def engine_of(model: nn.Module, stage: int = 3, **keys: object) -> zero.ZeroEngine:
    return sgd_engine(model, LR, stage=stage, **keys)


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def tokens(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.randint(0, 16, (2, ROWS), generator=generator).unbind()


def follows(engine: zero.ZeroEngine, reference: nn.Module, world_size: int) -> None:
    """Assert that the engine's gradients are those of `reference`, whose losses were summed over
    ranks.
    """
    for (name, param), expected in zip(
        engine.module.named_parameters(), reference.parameters(), strict=True
    ):
        found = fragments.safe_get_full_grad(param)
        assert_close(found, expected.grad / world_size, TERMS, what=name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_loss_backward_of_the_script(rank, world_size, stage):
    """Call `loss.backward()` with accumulation. The reference gets the batches of all ranks."""
    engine, reference = engine_of(build(Tied), stage, gradient_accumulation_steps=2), build(Tied)
    for step in range(3):
        for micro in range(2):
            engine(*tokens(step, 2 * rank + micro)).backward()
            for part in range(world_size):
                (reference(*tokens(step, 2 * part + micro)) / 2).backward()
            if engine.is_gradient_accumulation_boundary():
                follows(engine, reference, world_size)
            engine.step()
        with torch.no_grad():
            for param in reference.parameters():
                param -= LR * param.grad / world_size
                param.grad = None
    assert engine.residency.live == 0


@on_ranks(2)
def test_two_engines_under_one_loss(rank, world_size):
    """Sum the losses of two engines. One engine runs backward, and each gets its own gradients."""
    engines = [engine_of(build(Tied), gradient_accumulation_steps=2) for _ in range(2)]
    references = [build(Tied) for _ in range(2)]
    engines[0].backward(engines[0](*tokens(0, rank)) + 5 * engines[1](*tokens(1, rank)))
    for part in range(world_size):
        ((references[0](*tokens(0, part)) + 5 * references[1](*tokens(1, part))) / 2).backward()
    for engine, reference in zip(engines, references, strict=True):
        follows(engine, reference, world_size)


def no_sync(rank: int, world_size: int, stage: int) -> str:
    """Another backward follows; in the second step, none does."""
    engine, reference = engine_of(build(Tied), stage), build(Tied)
    try:
        with engine.no_sync():
            engine.backward(engine(*tokens(0, rank)))
            with pytest.raises(ValueError, match="no_sync"):
                engine.step()
    except UsageError as error:
        return str(error)
    assert engine.comm.calls["reduce_scatter"] == 0
    engine.backward(engine(*tokens(1, rank)))
    for part in range(world_size):
        (reference(*tokens(0, part)) + reference(*tokens(1, part))).backward()
    follows(engine, reference, world_size)
    engine.zero_grad()
    weight, before = engine.module.layer.weight, reference.layer.weight.detach()
    with engine.no_sync():
        engine.backward(engine(*tokens(0, rank)))
    engine.step()
    reference.zero_grad()
    for part in range(world_size):
        (reference(*tokens(0, part)) / world_size).backward()
    expected = before - LR * reference.layer.weight.grad
    assert_close(fragments.safe_get_full_fp32_param(weight), expected, TERMS)
    return ""


def test_no_sync_where_ranks_keep_whole_gradients():
    assert [run_on(2, no_sync, stage)[0] for stage in (0, 1)] == ["", ""]
    assert "incompatible with zero_optimization.stage 3" in run_on(2, no_sync, 3)[0]


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_fragments_are_read_and_written(rank, world_size, stage):
    """Values that are written can be read back, match the local parts, and are used by the
    optimizer.
    """
    model = build(Experts)
    engine = engine_of(model, stage)
    engine.optimizer.optimizer.param_groups[0]["momentum"] = 0.9
    full = {
        name: fragments.safe_get_full_fp32_param(param) for name, param in model.named_parameters()
    }
    plain = dict(build(Experts).named_parameters())
    assert all(torch.equal(full[name], plain[name]) for name in full)
    weight = model.out.weight
    assert fragments.safe_get_full_grad(weight) is None
    engine.backward(engine(torch.ones(ROWS, WIDTH), 0))
    value = torch.arange(WIDTH, dtype=torch.float32).view(1, WIDTH)
    fragments.safe_set_full_grad(weight, value)
    assert torch.equal(fragments.safe_get_full_grad(weight), value)
    fragments.safe_update_full_grad_vectorized([weight], lambda grad, param: grad + param.numel())
    value = value + weight.numel()
    assert torch.equal(fragments.safe_get_full_grad(weight), value)
    local = fragments.safe_get_local_grad(weight)
    assert local.shape == weight.ds_tensor.shape
    fragments.safe_set_local_grad(weight, local + 1)
    engine.step()
    expected = full["out.weight"] - LR * (value + 1)
    torch.testing.assert_close(fragments.safe_get_full_fp32_param(weight), expected)
    assert torch.equal(
        fragments.safe_get_full_optimizer_state(weight, "momentum_buffer"), value + 1
    )
    fragments.safe_set_full_fp32_param(weight, 2 * value)
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, 2 * value)
    with pytest.raises(UsageError, match="shape"):
        fragments.safe_set_full_fp32_param(weight, torch.ones(3))


class Sum(nn.Module):
    """Three groups. Each has one parameter of 5 elements, which two ranks cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Scale() for _ in range(3)])
        for part in self.parts:
            part.value = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x) * (number + 1) for number, part in enumerate(self.parts)).mul(x).sum()


@on_ranks(2)
def test_parts_of_a_parameter_that_is_a_group_by_itself(rank, world_size):
    """`ds_tensor` is this rank's part of a parameter.

    Its gradient has that shape. The norm of all is that of the step.
    """
    engine = engine_of(build(Sum), gradient_accumulation_steps=2)
    values = [part.value for part in engine.module.parts]
    for value in values:
        assert value.ds_tensor.shape == (3,) and value.partition_numel() == 3
        value.ds_tensor.data = torch.full((3,), 1.0 + rank)
    assert all(fragments.safe_get_local_grad(value) is None for value in values)
    expected = torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0])
    for step in range(2):
        loss = engine(torch.ones(5))
        assert loss.item() == 6 * expected.sum()
        engine.backward(loss)
        for number, value in enumerate(values):
            filled = torch.tensor([1.0, 1.0, 0.0 if rank else 1.0])
            grad = fragments.safe_get_local_grad(value)
            assert torch.equal(grad, filled * (number + 1) * (step + 1) / 2)
        if step == 0:
            engine.step()
    squares = sum(fragments.safe_get_full_grad(value).square().sum() for value in values)
    engine.step()
    torch.testing.assert_close(squares.sqrt().item(), engine.get_global_grad_norm())
    fragments.safe_set_full_fp32_param(values[0], torch.arange(5.0))
    assert torch.equal(fragments.safe_get_full_fp32_param(values[0]), torch.arange(5.0))
