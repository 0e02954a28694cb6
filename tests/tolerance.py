"""Tolerances for two computations of the same numbers that may differ by rounding, on any CPU.

Runs with the same shapes and the same order of sums have the same bits. Tests of these have no
tolerance. If shapes differ (a batch whole or in slices, a norm summed in parts, a cache instead of
the whole sequence), kernels of each CPU add in different orders. Then the tolerance is derived from
the dtype, not from the results of one machine:

One rounding is off by at most eps / 2, up or down, so its standard deviation is eps / sqrt(12).
Errors of n roundings add up as in a random walk (Higham and Mary, SIAM J. Sci. Comput. 41(5),
2019). So two computations differ by sqrt(2 n / 12) eps. Less than one in a million differs by more
than five times that, 2 sqrt(n) eps. A step of a training starts from the result of the last one. So
the differences of all steps add up."""

from __future__ import annotations

import math

import torch


def rounding(dtype: torch.dtype, terms: int, steps: int = 1) -> float:
    """Return the largest relative difference that rounding explains, relative to the largest of the
    terms.

    A result may be smaller than its terms, where these cancel. Args: terms: additions in `dtype`
    between input and result; for a chain of matrix products the sum of their inner lengths. steps:
    how many times a result was the input of the next step."""
    return 2 * math.sqrt(terms) * torch.finfo(dtype).eps * steps


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, terms: int, steps: int = 1, what: str = ""
) -> None:
    """Assert equality within rounding in `found`'s dtype, relative to the largest element of
    `expected`, or to 1.

    The error text begins with `what`.
    """
    assert found.shape == expected.shape
    allowed = rounding(found.dtype, terms, steps) * max(1.0, expected.abs().max().item())
    largest = (found.double() - expected.double()).abs().max().item()
    assert largest <= allowed, f"{what} {largest:g} apart, where rounding explains {allowed:g}"
