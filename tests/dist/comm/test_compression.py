"""Weights and gradients as codes with scales: bytes on the wire, error bounds, the same weights on
all ranks.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import zero
from tests.dist.messages import counted_messages
from tests.dist.training import (
    Curve,
    assert_same_weights,
    curve_on,
    ds_config,
    relative,
    start,
    train_in_slices,
    train_zero,
    weights_of,
)
from tests.processes import on_ranks, run_on
from zero.build import make_training_comm
from zero.comm.communicator import communicator
from zero.comm.quantized import (
    BLOCK,
    CompressedCommunicator,
    decode,
    encode,
    machine_size,
    message_bytes,
)
from zero.config import load_config

WIDTH = 64
WHOLE = {"stage3_param_persistence_threshold": 0}
WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
FOUR_BITS = {**GRADIENTS, "zero_quantized_gradient_bits": 4}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return (hidden.float() - y).square().mean()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def data(steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(8, WIDTH, generator=generator) for name in "xy"} for _ in range(steps)
    ]


# -- one message


def coded(values: torch.Tensor, bits: int) -> torch.Tensor:
    message = torch.empty(message_bytes(values.numel(), bits), dtype=torch.uint8)
    encode(values, message, bits)
    found = torch.empty_like(values)
    decode(message, found, bits)
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", [1, BLOCK, 5 * BLOCK + 3, (1 << 16) + 100])
def test_an_error_is_at_most_half_a_step_of_its_block(bits, numel):
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * torch.logspace(-6, 6, numel)
    error = (coded(values, bits) - values).abs()
    for block, wrong in zip(values.split(BLOCK), error.split(BLOCK), strict=True):
        half_a_step = block.abs().max() / (2 ** (bits - 1) - 1) / 2
        assert wrong.max() <= half_a_step * (1 + 1e-5)
        # The bound is reached: a scale that is too small for its block would not be seen otherwise.
        assert block.numel() < BLOCK or wrong.max() >= half_a_step / 2


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zero_and_the_largest_value_of_a_block_stays_itself(bits):
    values = torch.zeros(3 * BLOCK)
    values[BLOCK + 5], values[2 * BLOCK] = -3.0, 1e-38
    found = coded(values, bits)
    assert torch.equal(found[:BLOCK], values[:BLOCK])
    assert found[BLOCK + 5] == pytest.approx(-3.0) and found.count_nonzero() == 1


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_still_noticed(bits, bad):
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 7] = bad
    finite = coded(values, bits).isfinite()
    assert finite[:BLOCK].all() and finite[2 * BLOCK :].all()
    assert not finite[BLOCK : 2 * BLOCK].any()


def test_16_bit_values_are_rounded_once_more_only():
    values = torch.randn(4 * BLOCK).bfloat16()
    assert torch.equal(coded(values, 8), coded(values.float(), 8).bfloat16())


# -- messages between ranks


def looked_at(engine: zero.ZeroEngine) -> dict[str, torch.Tensor]:
    """The weights as the layers see them in a forward."""
    seen: dict[str, torch.Tensor] = {}

    def look(name: str, own: nn.Linear, *_: object) -> None:
        seen[name] = own.weight.detach().clone()

    for name, layer in engine.module.layers.named_children():
        layer.register_forward_hook(partial(look, f"{name}.weight"))
    with torch.no_grad():
        engine(**data(1)[0])
    return seen


def gathered_weights(rank: int, world_size: int) -> tuple[dict, dict, dict]:
    """As forward sees them, as `GatheredParameters` shows them after it, and what a checkpoint
    would get.
    """
    engine, _ = start(model(), ds_config(**WHOLE, **WEIGHTS))
    seen = looked_at(engine)
    assert any(group.source is not group.comm for group in engine.groups)
    with zero.GatheredParameters(list(engine.module.parameters())):
        shown = weights_of(engine.module.layers)
    return seen, shown, engine._zero3_consolidated_16bit_state_dict() or {}


def test_all_ranks_compute_with_the_same_rounded_weights_and_nothing_else_is_rounded():
    ranks = run_on(2, gathered_weights)
    exact = weights_of(model().layers)
    saved = {name.removeprefix("layers."): value for name, value in ranks[0][2].items()}
    rounded = {
        name: torch.cat([coded(part, 8) for part in value.view(-1).chunk(2)]).view_as(value)
        for name, value in exact.items()
    }
    assert not any(torch.equal(rounded[name], value) for name, value in exact.items())
    assert_same_weights(saved, exact)
    for seen, shown, _ in ranks:
        assert_same_weights(seen, rounded)
        assert_same_weights(shown, exact)


def changed_after_evaluation(rank: int, world_size: int) -> torch.Tensor:
    """A group that an evaluation has left gathered is changed: one element, and no other."""
    engine, _ = start(model(), ds_config(**WHOLE, **WEIGHTS))
    weight = engine.module.layers[1].weight
    with torch.no_grad():
        engine(**data(1)[0])
    with zero.GatheredParameters([weight], modifier_rank=0):
        if rank == 0:
            weight.data[0, 0] = 5.0
    with zero.GatheredParameters([weight]):
        return weight.detach().clone()


def test_a_change_of_weights_rounds_none_of_the_others():
    expected = model().layers[1].weight.detach().clone()
    expected[0, 0] = 5.0
    for found in run_on(2, changed_after_evaluation):
        assert torch.equal(found, expected)


def reduced(
    rank: int, world_size: int, bits: int, size: int, whole: bool
) -> tuple[torch.Tensor, int]:
    """Two sums of one gradient, one added to the other."""
    comm = CompressedCommunicator(
        communicator(), weights=False, frozen_weights=False, gradient_bits=bits
    )
    full = gradient_of(rank, size * world_size)
    out = torch.empty(size * world_size if whole else size)
    exchange = comm.reduce if whole else comm.reduce_scatter
    before = comm.calls["all_to_all"]
    exchange(out, full.clone(), False).wait()
    exchange(out, full.clone(), True).wait()
    return out * comm.mean_factor, comm.calls["all_to_all"] - before


def gradient_of(rank: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator) * 10**rank


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("whole", [False, True])
def test_a_sum_of_gradients_has_each_peers_rounding_once(bits, whole):
    """Blocks of ranks with different scales: sums of codes would be wrong by the factor between the
    scales.
    """
    ranks, size = 3, 5 * BLOCK + 12
    results = run_on(ranks, reduced, bits, size, whole)
    gradients = [gradient_of(rank, size * ranks) for rank in range(ranks)]
    exact = 2 * sum(gradients) / ranks
    found = results[0][0] if whole else torch.cat([result for result, _ in results])
    bound = torch.zeros_like(exact)
    for owner, part in enumerate(bound.split(size)):
        for peer, gradient in enumerate(gradients):
            if peer != owner:
                for block, of in zip(
                    part.split(BLOCK), gradient[owner * size :][:size].split(BLOCK), strict=True
                ):
                    block += 2 * of.abs().max() / (2 ** (bits - 1) - 1) / 2 / ranks
    assert ((found - exact).abs() <= bound * (1 + 1e-5) + 1e-6).all()
    assert not torch.equal(found, exact)
    assert all(calls == 2 for _, calls in results), "one exchange for each sum"
    if whole:
        assert all(torch.equal(result, found) for result, _ in results)


@pytest.mark.parametrize(
    ("machines", "expected"),
    [("aabb", 2), ("aaaa", 4), ("abab", 1), ("aabbb", 1), ("aab", 1), ("abc", 1)],
)
def test_ranks_of_a_machine_are_consecutive_and_as_many_on_each(machines, expected):
    assert machine_size(machines) == expected


def reduced_by_machines(
    rank: int, world_size: int, bits: int, size: int
) -> tuple[torch.Tensor, Counter]:
    """Two sums of one gradient, one added to the other, by the engine's own choice of a
    communicator.
    """
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    section = {**GRADIENTS, "stage": 2, "zero_quantized_gradient_bits": bits}
    config = load_config(ds_config(**section))
    comm = make_training_comm(config, communicator(), [])
    full, out = gradient_of(rank, size * world_size), torch.empty(size)
    with counted_messages() as sent:
        comm.reduce_scatter(out, full.clone(), False).wait()
        comm.reduce_scatter(out, full.clone(), True).wait()
    return out * comm.mean_factor, sent


@pytest.mark.parametrize("bits", [8, 4])
def test_ranks_of_a_machine_sum_before_they_send_to_other_machines(bits):
    ranks, size = 4, 2 * BLOCK + 12
    results = run_on(ranks, reduced_by_machines, bits, size)
    gradients = [gradient_of(rank, size * ranks) for rank in range(ranks)]
    exact = 2 * sum(gradients) / ranks
    # Each sum has one rounding of the other rank of the machine, and one of the other machine's
    # sum.
    for owner, (found, sent) in enumerate(results):
        own = slice(owner * size, (owner + 1) * size)
        sums = [sum(g[own] for g in gradients[machine : machine + 2]) for machine in (0, 2)]
        neighbour, other = gradients[owner ^ 1][own], sums[1 - owner // 2]
        # Of the other machine, rounded there.
        far = gradients[(owner + 2) % 4 ^ 1][own]
        steps = [each.abs().amax() / (2 ** (bits - 1) - 1) / 2 for each in (neighbour, far)]
        steps.append((other.abs().amax() + steps[1]) / (2 ** (bits - 1) - 1) / 2)
        error = (found - exact[own]).abs().max()
        assert 0 < error <= 2 * sum(steps) / ranks * (1 + 1e-5)
        # Per sum two slices to the neighbour, and one to the same place of the other machine; none
        # to the fourth rank.
        slices = 2 * (message_bytes(2 * BLOCK, bits) + message_bytes(12, bits))
        near, other_machine = ("all_to_all", owner ^ 1), ("all_to_all", (owner + 2) % 4)
        assert sent == {near: 2 * slices, other_machine: slices}


@on_ranks(2)
def test_frozen_weights_alone_can_be_compressed(rank, world_size):
    """Which groups' values are rounded while they are in use."""
    frozen = model()
    frozen.layers[1].requires_grad_(False)
    engine, _ = start(frozen, ds_config(**WHOLE, zero_quantized_nontrainable_weights=True))
    exact = weights_of(model().layers)
    assert {
        name: not torch.equal(seen, exact[name]) for name, seen in looked_at(engine).items()
    } == {"0.weight": False, "1.weight": True, "2.weight": False}


# -- training


STEPS = 12
LARGEST_DRIFT = {8: 1e-3, 4: 2e-2}


def trained(rank: int, world_size: int, settings: dict) -> Curve:
    return train_zero(start(model(), ds_config(**WHOLE, **settings))[0], data(STEPS))


@pytest.mark.parametrize(
    "settings, bits",
    [
        ({**WEIGHTS, **GRADIENTS, "accumulation": 2, "clip": 0.05}, 8),
        ({**GRADIENTS, "stage": 1, "accumulation": 2, "clip": 0.05}, 8),
        ({**GRADIENTS, "stage": 0, "clip": 0.05}, 8),
        ({**WEIGHTS, **FOUR_BITS, "clip": 0.05}, 4),
    ],
    ids=["stage 3", "stage 1", "stage 0", "4 bits"],
)
def test_training_stays_close_to_plain_torch(settings, bits):
    found = curve_on(2, trained, settings)
    expected = train_in_slices(model(), data(STEPS), 2, settings.get("accumulation", 1), clip=0.05)
    assert 0 < relative(found.mean_losses(), expected.mean_losses()) < LARGEST_DRIFT[bits]
    assert 0 < relative(found.norms, expected.norms) < LARGEST_DRIFT[bits]
