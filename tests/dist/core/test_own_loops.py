"""Own training loops:

`loss.backward()`, several forwards, reads outside of modules, `zero.fragments`, generation.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zero
from tests.dist.toys import messages
from tests.dist.training import assert_gradients, sgd_engine
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
                assert_gradients(engine.module, reference, world_size, TERMS)
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
        assert_gradients(engine.module, reference, world_size, TERMS)
        refused = pytest.raises(UsageError, match="incompatible with zero_optimization.stage 3")
        with refused, engine.no_sync():
            pass


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_no_sync_where_ranks_keep_whole_gradients(rank, world_size, stage):
    """Another backward follows; in the second step, none does."""
    engine, reference = engine_of(build(Tied), stage), build(Tied)
    with engine.no_sync():
        engine.backward(engine(*tokens(0, rank)))
        with pytest.raises(ValueError, match="no_sync"):
            engine.step()
    assert engine.comm.calls["reduce_scatter"] == 0
    engine.backward(engine(*tokens(1, rank)))
    for part in range(world_size):
        (reference(*tokens(0, part)) + reference(*tokens(1, part))).backward()
    assert_gradients(engine.module, reference, world_size, TERMS)
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


# -- scripts that work on `.grad` themselves, which has no effect: they are told once


def clips_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clamps_the_largest(model: nn.Module) -> None:
    param = max(model.parameters(), key=torch.Tensor.numel)
    if param.grad is not None:
        param.grad.view(-1).clamp_(min=0.1)


def replaces(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


def clears(model: nn.Module) -> None:
    model.to("cpu")
    for param in model.parameters():
        assert param.grad is None or param.grad.shape == param.shape
    model.zero_grad(set_to_none=False)
    model.zero_grad()


def nothing(model: nn.Module) -> None: ...


def train(
    rank: int, world_size: int, stage: int, work: Callable[[nn.Module], None], every: int = 1
) -> tuple[list[torch.Tensor], list[str]]:
    told = messages()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    engine = sgd_engine(model, stage=stage, accumulation=2)
    generator = torch.Generator().manual_seed(rank)
    for micro in range(2 * 3):
        engine.backward(engine(torch.randn(3, 4, generator=generator)).square().mean())
        if micro % every == every - 1:
            work(model)
        engine.step()
        assert all(param.grad is None for param in model.parameters()) or engine.global_steps == 0
    with zero.GatheredParameters(model.parameters()):
        weights = [param.detach().clone() for param in model.parameters()]
    return weights, [text for text in told if "has no effect" in text]


# Each in a process of its own, which is told once.
@pytest.mark.parametrize("work", [clips_norm, clamps_the_largest, replaces, clears])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_work_on_gradients_is_told_once_and_has_no_effect(rank, world_size, stage, work):
    (expected, nothing_said), (weights, texts) = [
        train(rank, world_size, stage, each) for each in (nothing, work)
    ]
    assert all(map(torch.equal, weights, expected)) and nothing_said == []
    if work is clears:
        assert texts == []
    else:
        (text,) = texts
        assert "`gradient_clipping` in the configuration" in text


@pytest.mark.parametrize("every", [2, 4])
def test_work_at_the_end_of_a_step_is_told(every):
    """Not in the first micro-batch, and not in the first step."""
    for _, texts in run_on(2, train, 3, clips_norm, every):
        assert len(texts) == 1


def hooked(rank: int, world_size: int, steps: int) -> list[str]:
    told = messages()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model[1].weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(0.1))
    sgd_engine(model, accumulation=steps)
    return [text for text in told if "register_post_accumulate_grad_hook" in text]


def test_a_hook_that_sees_no_sum_is_named():
    assert run_on(1, hooked, 1) == [[]]
    (texts,) = run_on(1, hooked, 3)
    assert len(texts) == 1 and texts[0].startswith("1.weight")


# -- a script that cuts the graph in two, and carries the gradient over the cut itself


CUT_WIDTH, CUTS, RATE = 4, 2, 0.1


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(CUT_WIDTH, CUT_WIDTH), nn.Linear(CUT_WIDTH, CUT_WIDTH))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("by_engine", [False, True])
@on_ranks(2)
def test_gradients_carried_by_the_script(rank, world_size, stage, by_engine):
    """They are those of plain torch if the script runs all backwards.

    After `engine.backward` they are divided by the accumulation twice, which a warning tells once.
    """
    trained, reference = model(), model()
    engine = sgd_engine(trained, RATE, stage=stage, accumulation=CUTS)
    warnings = messages()
    inputs = torch.randn(CUTS, world_size, 3, CUT_WIDTH)
    for part in inputs:
        hidden = trained[0](part[rank])
        given = hidden.detach().requires_grad_()
        loss = trained[1](given).square().mean()
        if by_engine:
            engine.backward(loss)
        else:
            engine.scale(loss).backward()
        hidden.backward(given.grad)
        engine.step()
    losses = [reference(x).square().mean() for x in inputs.flatten(0, 1)]
    (sum(losses) / len(losses)).backward()
    with zero.GatheredParameters(trained.parameters()):
        for (name, param), plain in zip(
            trained.named_parameters(), reference.parameters(), strict=True
        ):
            first_layer = name.startswith("0.")
            factor = 1 / CUTS if by_engine and first_layer else 1.0
            expected = plain.detach() - RATE * factor * plain.grad
            assert_close(param.detach(), expected, 100, 2, name)
    told = [warning for warning in warnings if "twice" in warning and "engine.scale" in warning]
    assert len(told) == by_engine, warnings
