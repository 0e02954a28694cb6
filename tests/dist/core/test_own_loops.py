"""Own training loops:

`loss.backward()`, several forwards, reads outside of modules, `zero.fragments`, generation.
"""

from __future__ import annotations

import logging
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from tests.dist.training import ds_config
from tests.processes import run_on
from tests.tolerance import assert_close
from zero import fragments
from zero.errors import UsageError
from zero.integrations.deepspeed.labels import ZeroParamStatus
from zero.offload.activations import MIN_BYTES, HostActivations

WIDTH, ROWS, LR = 8, 4, 1e-2
# The inner lengths of two layers, forward and backward, and the sums over rows and micro-batches.
TERMS = 4 * WIDTH + 4 * ROWS
SMALL = {"stage3_param_persistence_threshold": 0}


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


def engine_of(model: nn.Module, stage: int = 3, **top: object) -> zero.ZeroEngine:
    config = ds_config(**SMALL) | top
    config["zero_optimization"]["stage"] = stage
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def tokens(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.randint(0, 16, (ROWS,), generator=generator), torch.randint(
        0, 16, (ROWS,), generator=generator
    )


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: fragments.safe_get_full_grad(param) for name, param in model.named_parameters()}


def follows(engine: zero.ZeroEngine, reference: nn.Module, world_size: int) -> None:
    """Assert that the engine's gradients are those of `reference`, whose losses were summed over
    ranks.
    """
    for name, grad in gradients(engine.module).items():
        expected = dict(reference.named_parameters())[name].grad
        assert_close(grad, expected / world_size, TERMS)


def user_backward(rank: int, world_size: int, stage: int) -> int:
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
    return engine.residency.live


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loss_backward_of_the_script(stage):
    assert run_on(2, user_backward, stage) == [0, 0]


def several(rank: int, world_size: int) -> None:
    """Run two forwards before one backward, and two backwards of one graph with `zero_grad` between
    them.
    """
    engine, reference = engine_of(build(Tied)), build(Tied)
    engine.backward(engine(*tokens(0, rank)) + engine(*tokens(1, rank)))
    for part in range(world_size):
        (reference(*tokens(0, part)) + reference(*tokens(1, part))).backward()
    follows(engine, reference, world_size)
    engine.zero_grad()
    loss = engine(*tokens(2, rank))
    engine.backward(loss, retain_graph=True)
    engine.zero_grad()
    engine.backward(3 * loss)
    reference.zero_grad()
    for part in range(world_size):
        (3 * reference(*tokens(2, part))).backward()
    follows(engine, reference, world_size)


def test_several_forwards_and_backwards():
    run_on(2, several)


def backward_in_two_parts(rank: int, world_size: int) -> None:
    config = ds_config(stage=2, accumulation=2)
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.ModuleDict({"first": first, "second": second})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    hidden = first(torch.ones(2, 4))
    given = hidden.detach().requires_grad_()
    engine.backward(second(given).mean())
    hidden.backward(given.grad)


def warnings_of_two_parts(rank: int, world_size: int) -> list[str]:
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zero").addHandler(handler)
    backward_in_two_parts(rank, world_size)
    return said


def test_a_loss_that_is_divided_twice_is_a_warning():
    assert "divided by gradient_accumulation_steps twice" in " ".join(
        run_on(1, warnings_of_two_parts)[0]
    )


def two_engines(rank: int, world_size: int) -> None:
    """Sum the losses of two engines. One engine runs backward, and each gets its own gradients."""
    engines = [engine_of(build(Tied), gradient_accumulation_steps=2) for _ in range(2)]
    references = [build(Tied) for _ in range(2)]
    engines[0].backward(engines[0](*tokens(0, rank)) + 5 * engines[1](*tokens(1, rank)))
    for part in range(world_size):
        ((references[0](*tokens(0, part)) + 5 * references[1](*tokens(1, part))) / 2).backward()
    for engine, reference in zip(engines, references, strict=True):
        follows(engine, reference, world_size)


def unusual(rank: int, world_size: int, stage: int) -> None:
    """A loss that does not call the root; a step after `no_sync` alone; a backward that fails, and
    the next one.
    """
    batch = torch.ones(ROWS, WIDTH)
    engine, reference = engine_of(build(Experts), stage), build(Experts)

    def loss_of_parts(model: nn.Module) -> torch.Tensor:
        return model.out(torch.tanh(model.experts[0](batch))).square().mean()

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("in the middle of backward")

    failing = loss_of_parts(engine.module)
    failing.register_hook(fail)
    with pytest.raises(KeyError):
        engine.backward(failing)
    engine.zero_grad()
    for _ in range(2):
        engine.backward(loss_of_parts(engine.module))
        engine.step()
        loss_of_parts(reference).backward()
        with torch.no_grad():
            for param in reference.parameters():
                if param.grad is not None:
                    param -= LR * param.grad
                    param.grad = None
    if stage < 2:
        with engine.no_sync():
            engine.backward(engine(batch, 1))
        engine.step()
        reference(batch, 1).backward()
        with torch.no_grad():
            for param in reference.parameters():
                if param.grad is not None:
                    param -= LR * param.grad
    for name, param in engine.module.named_parameters():
        expected = dict(reference.named_parameters())[name]
        assert_close(fragments.safe_get_full_fp32_param(param), expected.detach(), TERMS)


@pytest.mark.parametrize("stage", [1, 3])
def test_unusual_backwards(stage):
    run_on(2, unusual, stage)


def test_two_engines_under_one_loss():
    run_on(2, two_engines)


def no_sync(rank: int, world_size: int, stage: int) -> str:
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
    return ""


def test_no_sync_where_ranks_keep_whole_gradients():
    assert [run_on(2, no_sync, stage)[0] for stage in (0, 1)] == ["", ""]
    assert "incompatible with zero_optimization.stage 3" in run_on(2, no_sync, 3)[0]


def fragments_of(rank: int, world_size: int, stage: int) -> None:
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


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_fragments_are_read_and_written(stage):
    run_on(2, fragments_of, stage)


class Sum(nn.Module):
    """Three groups. Each has one parameter of 5 elements, which two ranks cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Scale() for _ in range(3)])
        for part in self.parts:
            part.value = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x) * (number + 1) for number, part in enumerate(self.parts)).mul(x).sum()


def parts_of_a_parameter(rank: int, world_size: int) -> None:
    """`ds_tensor` is this rank's part of a parameter.

    Its gradient has that shape. The norm of all is that of the step.
    """
    engine = engine_of(build(Sum), gradient_accumulation_steps=2)
    values = [part.value for part in engine.module.parts]
    for value in values:
        assert value.ds_tensor.shape == (3,)
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


def test_parts_of_a_parameter_that_is_a_group_by_itself():
    run_on(2, parts_of_a_parameter)


def generation(rank: int, world_size: int) -> None:
    """While all parameters are shown nothing is gathered, with hooks or without them.

    After it, the model runs as before.
    """
    engine = engine_of(build(Tied))
    before = engine(*tokens(0, rank))
    engine.backward(before)
    engine.zero_grad()
    hooks = engine.optimizer.parameter_offload
    with zero.GatheredParameters(engine.parameters()), torch.no_grad():
        gathered = engine.comm.calls["all_gather"]
        for _ in range(2):
            assert torch.equal(engine(*tokens(0, rank)), before)
        assert engine.comm.calls["all_gather"] == gathered
    with zero.GatheredParameters(engine.parameters()), torch.no_grad():  # as TRL does it
        for param in [*hooks.module.parameters(), *hooks.module.ds_external_parameters()]:
            param.ds_active_sub_modules.clear()
        for handle in [*hooks.forward_hooks, *hooks.backward_hooks]:
            handle.remove()
        hooks.forward_hooks = []
        hooks.backward_hooks = []
        assert torch.equal(engine.module(*tokens(0, rank)), before)
        hooks._register_deepspeed_module(hooks.module)
        assert hooks.forward_hooks and hooks.backward_hooks
    assert (
        engine.module.embed.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        and engine.residency.live == 0
    )
    reference = build(Tied)
    engine.backward(engine(*tokens(0, rank)))
    for part in range(world_size):
        reference(*tokens(0, part)).backward()
    follows(engine, reference, world_size)


def test_generation_without_hooks():
    run_on(2, generation)


class Wide(nn.Module):
    """Keeps large activations only as inputs of checkpointed layers.

    `seen` shows which of them are alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.seen: list[weakref.ref] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
            self.seen.append(weakref.ref(x))
        return x.square().mean()


def activations_on_the_host(rank: int, world_size: int) -> None:
    """Gradients are the same, and the device copies of the checkpoints' inputs are freed after
    forward.
    """
    batch = torch.randn(
        2 * MIN_BYTES // WIDTH // 4, WIDTH, generator=torch.Generator().manual_seed(rank)
    )
    found, alive = [], []
    for moved in (False, True):
        engine = engine_of(build(Wide))
        # The engine does this on a GPU only.
        engine.activations = HostActivations(engine.device) if moved else None
        loss = engine(batch)
        alive.append(sum(reference() is not None for reference in engine.module.seen))
        engine.backward(loss)
        found.append(gradients(engine.module))
    assert engine.activations.moved_bytes >= 3 * batch.nbytes
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert alive == [3, 0]


def test_activations_in_host_memory_give_the_same_gradients():
    run_on(2, activations_on_the_host)
