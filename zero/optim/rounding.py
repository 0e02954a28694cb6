"""Stochastic rounding of fp32 values to bf16, for training without fp32 masters (arXiv 2010.06192).

A value between two bf16 numbers becomes the upper one with a probability that grows from 0 to 1
between them. So the mean of the rounded value is the value, and updates that are too small for bf16
still count on the average. Rounding to the nearest number would lose them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import torch

from zero.core.optimizer_shard import OptimizerShard

# Elements of a parameter that share a key.
BLOCK = 1 << 20


def at_a_time(device: torch.device) -> int:
    """How many elements are rounded together: few enough for a CPU's cache, and enough for an
    accelerator, which launches some twenty kernels for them.
    """
    return BLOCK >> 2 if device.type == "cpu" else BLOCK


class StochasticRounding:
    """Rounds with numbers that follow from seed, step, parameter and element: the same on any
    number of ranks, at any stage and on any device, wherever shards and sub-groups begin.

    Args:
        steps: gives the number of steps so far.
    """

    def __init__(self, seed: int, steps: Callable[[], int]):
        self._seed = seed
        self._steps = steps
        self._step = 0

    def begin_step(self, number: int = 1) -> None:
        """Begin the next step, or with 0 something that follows the last one.

        Background updates of a step may still run while the engine counts the next one.
        """
        self._step = self._steps() + number

    def store(
        self,
        target: torch.Tensor,
        values: torch.Tensor,
        shard: OptimizerShard,
        start: int,
        kind: str = "",
    ) -> None:
        """Write fp32 `values`, of `shard` from element `start` on, to `target` (bf16). Both are
        1-D, of one length.

        `kind` names what it is: each kind has its own random numbers. Infinities and NaN stay what
        they are."""
        target.copy_(values)  # for the padding between parameters
        most = at_a_time(values.device)
        for name, _, first, where in shard.group.parts(start, start + values.numel()):
            # From positions in the parameter to positions in `values`.
            shift = where.start - first
            last = where.stop - shift
            for begin in range(first - first % most, last, most):
                block = begin - begin % BLOCK
                low, high = max(first, begin), min(last, begin + most)
                noise = torch.arange(
                    low - block, high - block, dtype=torch.int32, device=values.device
                )
                scramble(noise, f"{self._seed} {self._step} {kind} {name} {block}")
                there = slice(low + shift, high + shift)
                target[there].copy_(rounded(values[there], noise))


def scramble(counters: torch.Tensor, key: str) -> None:
    """Turn distinct counters (int32) into random numbers from 0 to 65535, in place.

    A counter-based generator: unlike one with a state, it gives any element's number without those
    before it. The rounds are those of the integer hash `lowbias32` (Wellons, "Prospecting for Hash
    Functions"), with 64 bits of the key's digest added in between. int32 wraps around on every
    device; shifts keep the sign, so that what they bring in is masked."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    before, between = struct.unpack("<2i", digest)
    counters.add_(before)
    counters.bitwise_xor_((counters >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    counters.bitwise_xor_((counters >> 15).bitwise_and_(0x1FFFF)).add_(between)
    counters.bitwise_xor_((counters >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    counters.bitwise_xor_((counters >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    counters.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def rounded(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """`values` (fp32) rounded to numbers of bf16, as fp32.

    `noise`: int32, from 0 to 65535, of the same shape.
    """
    # A bf16 number is the upper half of an fp32 one. A carry out of the lower half goes to the next
    # bf16 number.
    bits = (values.view(torch.int32) + noise).bitwise_and_(-(1 << 16))
    return torch.where(values.isfinite(), bits.view(torch.float32), values)
