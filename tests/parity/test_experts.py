"""Mixtures of experts as transformers packs them: groups of their own below the block, with plain
torch's numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import Curve, curve_on, ds_config, relative, start, train_zero
from tests.parity.models import (
    INNER,
    NOTHING_PERSISTS,
    WIDTH,
    assert_bits,
    batches,
    in_slices,
    mixture,
)
from zero.core.param_group import State

STEPS = 3
EXPERTS, LAYERS = 8, 2
EXPERTS_NUMEL = EXPERTS * 3 * WIDTH * INNER


def build(name: str, implementation: str) -> nn.Module:
    model = mixture(name, EXPERTS)
    model.config.output_router_logits = True
    model.set_experts_implementation(implementation)
    return model


def data() -> list[dict[str, torch.Tensor]]:
    return batches("llama", STEPS)


def look(engine: zero.ZeroEngine, name: str) -> None:
    """Experts are groups of their own, and gathered apart from the attention."""
    named = [
        (group, any("experts" in each for each in group.param_names)) for group in engine.groups
    ]
    experts = [group for group, is_of_experts in named if is_of_experts]
    assert len(experts) == {"mixtral": 2, "qwen3": 1}[name]
    assert not any(group.persistent for group in experts)
    assert all(group.layout.numel == EXPERTS_NUMEL for group in experts)
    blocks = [
        group for group, is_of_experts in named if "layers." in group.name and not is_of_experts
    ]
    assert len(blocks) == LAYERS

    def apart(*_: object) -> None:
        assert all(group.state is State.SHARDED for group in experts)

    for layer in engine.module.model.layers:
        layer.self_attn.register_forward_hook(apart)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_experts_are_groups_of_their_own_and_the_numbers_are_plain_torchs(name, implementation):
    config = ds_config(**NOTHING_PERSISTS, stage3_prefetch_bucket_size=0)
    assert_bits(2, partial(build, name, implementation), data(), config, partial(look, name=name))


def sliced(
    rank: int, world_size: int, name: str, implementation: str, experts: int, settings: dict
) -> Curve:
    """With room for so many experts of eight; `settings` may ask for checkpointing as well."""
    model = build(name, implementation)
    if settings.pop("checkpointing", False):
        model.gradient_checkpointing_enable()
    limit = 2 * experts * EXPERTS_NUMEL // EXPERTS
    engine, _ = start(
        model, ds_config(**NOTHING_PERSISTS, stage3_max_live_parameters=limit, **settings)
    )
    assert len(engine._sliced) == {"mixtral": 2, "qwen3": 1}[name]
    ranges: list[tuple[int, int]] = []
    for each in engine._sliced:
        each.run = partial(watched, each.run, ranges)
    curve = train_zero(engine, data())
    assert max(end - first for first, end in ranges) == experts
    largest = max(group.layout.numel for group in engine.groups if group.modules)
    assert limit // 2 < engine.residency.peak <= limit // 2 + largest + limit // 2
    assert engine.residency.live == 0
    assert_generation_gathers_what_is_chosen(engine, ranges)
    assert_a_copy_is_on_its_own(model.model.layers[0].mlp.experts)
    engine.destroy()
    assert "forward" not in vars(model.model.layers[0].mlp.experts)
    return curve


def assert_a_copy_is_on_its_own(experts: nn.Module) -> None:
    copied = copy.deepcopy(experts)
    inputs = torch.ones(1, WIDTH), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2)
    with torch.no_grad():
        torch.testing.assert_close(copied(*inputs), experts(*inputs))
        copied.down_proj.zero_()
        assert not copied(*inputs).any() and experts(*inputs).any()


def assert_generation_gathers_what_is_chosen(
    engine: zero.ZeroEngine, ranges: list[tuple[int, int]]
) -> None:
    token = torch.tensor([[5 + engine.comm.rank]])
    with_all = engine(input_ids=token).logits.detach()
    ranges.clear()
    with torch.no_grad():
        logits = engine(input_ids=token).logits
    torch.testing.assert_close(logits, with_all)
    run = sum(end - first for first, end in ranges)
    most = 2 * engine.comm.world_size * len(engine._sliced)  # two of each token
    assert 0 < run <= most < EXPERTS * len(engine._sliced)


def watched(
    run: Callable, ranges: list[tuple[int, int]], first: int, end: int, *rest: object
) -> torch.Tensor:
    ranges.append((first, end))
    return run(first, end, *rest)


SLICED = [
    ("mixtral", "eager", 1, {}),
    ("mixtral", "grouped_mm", 3, {"accumulation": 2, "checkpointing": True}),
    ("qwen3", "batched_mm", 2, {"offload_param": {"device": "cpu"}}),
]


@pytest.mark.parametrize("name, implementation, experts, settings", SLICED)
def test_experts_that_do_not_fit_are_gathered_in_slices(name, implementation, experts, settings):
    found = curve_on(2, sliced, name, implementation, experts, settings)
    options = {"accumulation": settings.get("accumulation", 1)}
    plain = curve_on(1, in_slices, partial(build, name, implementation), data(), 2, options)
    assert found.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert relative(found.mean_losses(), plain.mean_losses()) < 1e-6
    assert relative(found.norms, plain.norms) < 1e-6
    for key, value in plain.weights.items():
        torch.testing.assert_close(found.weights[key], value, rtol=1e-4, atol=1e-5, msg=key)
