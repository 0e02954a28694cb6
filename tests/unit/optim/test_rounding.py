"""Stochastic rounding: only neighbours, and right on the average. That it is the same wherever an
element lies: tests/dist/optim/test_without_masters.py.
"""

import pytest
import torch

from zero.optim.rounding import BLOCK, rounded, scramble

VALUES = torch.tensor([1.0, 1.001, -1.001, 0.0, 3e-39, -2.7e38, 1.0078124], dtype=torch.float32)


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
    numbers("0 1  weight 0")
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
