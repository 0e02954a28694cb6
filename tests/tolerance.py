"""How far apart rounding alone may take two computations of the same numbers, on whatever CPU.

Runs of the same shapes, with the same order of sums, have the same bits: such tests take no tolerance. Where shapes
differ (a batch in one piece or in slices, a norm summed in parts, a cache instead of the whole sequence) each CPU's
kernels add in orders of their own, and the tolerance follows from the dtype, not from what one machine showed:

One rounding is off by at most eps / 2 and as likely up as down, so it has a standard deviation of eps / sqrt(12).
Over n of them these add up as in a random walk (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019), and two ways of
computing differ by sqrt(2 n / 12) eps. Five times that, 2 sqrt(n) eps, is passed by less than one of a million.
Every step of a training begins where the last one ended, so that their differences add up.
"""

from __future__ import annotations

import math

import torch


def rounding(dtype: torch.dtype, terms: int, steps: int = 1) -> float:
    """The relative difference that rounding explains.

    Args: terms: additions in `dtype` between input and result; along a chain of matrix products the sum of their inner
    lengths; steps: how many times each result was the next one's input. It is relative to the largest of what is
    added: where terms cancel, a result may be smaller than they are.
    """
    return 2 * math.sqrt(terms) * torch.finfo(dtype).eps * steps


def assert_close(found: torch.Tensor, expected: torch.Tensor, terms: int, steps: int = 1, what: str = "") -> None:
    """Equal but for rounding in `found`'s dtype, relative to the largest element of `expected`, or to 1.

    An error begins with `what`.
    """
    assert found.shape == expected.shape
    allowed = rounding(found.dtype, terms, steps) * max(1.0, expected.abs().max().item())
    largest = (found.double() - expected.double()).abs().max().item()
    assert largest <= allowed, f"{what} {largest:g} apart, where rounding explains {allowed:g}"
