"""Stochastic rounding: only neighbours, right on the average, and the same wherever an element
lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero.core.layout import Piece
from zero.core.param_group import ParamGroup
from zero.optim.rounding import BLOCK, StochasticRounding, rounded, scramble

VALUES = torch.tensor([1.0, 1.001, -1.001, 0.0, 3e-39, -2.7e38, 1.0078124], dtype=torch.float32)


def shard_of(low: int, high: int, sizes: list[int]) -> SimpleNamespace:
    """The elements from `low` to `high` of a group whose parameters have these sizes."""
    pieces, offset = [], 0
    for slot, numel in enumerate(sizes):
        first, last = max(low, offset), min(high, offset + numel)
        if first < last:
            pieces.append(Piece(slot, first - low, first - offset, last - first))
        offset += numel
    names = [f"parameter {slot}" for slot in range(len(sizes))]
    slots = [SimpleNamespace(numel=numel) for numel in sizes]
    layout = SimpleNamespace(slots=slots)
    group: Any = SimpleNamespace(pieces=pieces, param_names=names, layout=layout)
    group.parts = partial(ParamGroup.parts, group)
    return SimpleNamespace(group=group)


def stored(
    values: torch.Tensor,
    sizes: list[int],
    cuts: Sequence[int] = (),
    sub_group: int = 10**9,
    *,
    seed=0,
    step=1,
    kind="",
) -> torch.Tensor:
    """`values` of a group, rounded by ranks that hold the pieces between `cuts`, sub-group by
    sub-group.
    """
    target, bounds = torch.empty(len(values), dtype=torch.bfloat16), [0, *cuts, len(values)]
    rounding = StochasticRounding(seed, lambda: step - 1)
    rounding.begin_step()
    for low, high in itertools.pairwise(bounds):
        for start in range(low, high, sub_group):
            end = min(high, start + sub_group)
            shard = shard_of(low, high, sizes)
            rounding.store(target[start:end], values[start:end], shard, start - low, kind)
    return target


def test_a_value_becomes_one_of_its_neighbours_and_is_right_on_the_average():
    noise = torch.arange(1 << 16, dtype=torch.int32)
    for value in VALUES:
        found = rounded(value.expand(1 << 16).contiguous(), noise)
        assert torch.equal(found.bfloat16().float(), found), "numbers of bf16"
        assert len(found.unique()) <= 2
        assert (found - value).abs().max() < 2**-7 * abs(value) + 2**-133
        assert found.double().mean() == pytest.approx(value.item(), rel=1e-9, abs=1e-44)


def test_numbers_of_bf16_and_what_is_not_finite_stay():
    values = torch.tensor([0.5, -3.0, float("inf"), -float("inf"), float("nan")])
    found = rounded(values, torch.full((5,), (1 << 16) - 1, dtype=torch.int32))
    torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)


def test_numbers_do_not_depend_on_where_shards_and_sub_groups_begin():
    sizes = [50, 2 * BLOCK + 77, 1000]
    values = torch.randn(
        sum(sizes) + 6, generator=torch.Generator().manual_seed(1)
    )  # the last 6 are padding
    whole = stored(values, sizes)
    assert torch.equal(stored(values, sizes, [5, BLOCK - 100, BLOCK + 3, sum(sizes) - 1]), whole)
    assert torch.equal(stored(values, sizes, [BLOCK], sub_group=10_000), whole)
    assert not torch.equal(stored(values[50:], sizes[1:])[-1006:], whole[-1006:]), (
        "each parameter has its own"
    )
    for other in ({"seed": 1}, {"step": 2}, {"kind": "exp_avg"}):
        assert not torch.equal(stored(values, sizes, **other), whole)


def numbers(key: str, count: int = BLOCK) -> torch.Tensor:
    found = torch.arange(count, dtype=torch.int32)
    scramble(found, key)
    return found


def test_rounding_makes_no_generators(monkeypatch):
    """A generator for each block costs a seed and kernels: 15,000 of them for a rank's 1e9
    elements.
    """
    monkeypatch.setattr(torch, "Generator", None)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    stored(torch.ones(1 << 18), [1 << 18])
    assert torch.equal(torch.get_rng_state(), before), "the script's random numbers stay"


def test_the_numbers_look_random():
    """Within five standard deviations: each value as often, no bit and no neighbour that tells
    another, on the way through an element's steps as well.
    """
    found = numbers("0 1  weight 0")
    assert found.min() == 0 and found.max() == (1 << 16) - 1
    expected = BLOCK / (1 << 16)
    chi_square = ((found.bincount(minlength=1 << 16) - expected) ** 2 / expected).sum()
    assert abs(chi_square - (1 << 16)) < 5 * (2 * (1 << 16)) ** 0.5
    for bit in range(16):
        assert abs((found >> bit & 1).double().mean() - 0.5) < 5 * 0.5 / BLOCK**0.5
    centred = (found - found.double().mean()) / found.double().std()
    for distance in (1, 2, 32, 256, 4096):
        product = centred[distance:] * centred[:-distance]
        assert abs(product.mean()) < 5 / len(product) ** 0.5
    steps = torch.stack([numbers(f"0 {step}  weight 0", 1000) for step in range(1000)]).double()
    deviations = (steps.mean(0) - 32767.5) / (65536 / 12**0.5 / 1000**0.5)
    assert deviations.abs().max() < 5 and deviations.std() == pytest.approx(1, abs=0.15)
