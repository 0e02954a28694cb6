"""Stochastic rounding of fp32 values to bf16, for training without fp32 masters (arXiv 2010.06192).

A value between two bf16 numbers becomes the upper one with a probability that grows from 0 to 1
between them. So the mean of the rounded value is the value, and updates that are too small for bf16
still count on the average. Rounding to the nearest number would lose them.

This file does not know what is rounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from zero.core.optimizer_shard import OptimizerShard

# Elements of a parameter for which random numbers are drawn together. Each block has its own
# generator, so an element's number does not depend on where shards and sub-groups begin.
BLOCK = 1 << 16


class StochasticRounding:
    """Draws by seed, step, parameter and element: the same on any number of ranks, at any stage, of
    one kind of device.

    Args: steps: gives the number of steps so far.
    """

    def __init__(self, seed: int, steps: Callable[[], int]):
        self._seed = seed
        self._steps = steps
        self._step = 0

    def begin_step(self) -> None:
        """The values of a new step come now.

        Late updates of a step go on while the engine counts the next one.
        """
        self._step = self._steps()

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
        group, end = shard.group, start + values.numel()
        for piece in group.pieces:
            name, numel = group.param_names[piece.slot], group.layout.slots[piece.slot].numel
            # From positions in the parameter to positions in the shard.
            shift = piece.start - piece.inside
            first = max(piece.start, start) - shift
            last = min(piece.start + piece.numel, end) - shift
            for begin in range(first - first % BLOCK, last, BLOCK) if first < last else ():
                low, high = max(first, begin), min(last, begin + BLOCK)
                noise = self._noise(
                    f"{kind} {name} {begin}", min(BLOCK, numel - begin), values.device
                )
                where = slice(low + shift - start, high + shift - start)
                target[where].copy_(rounded(values[where], noise[low - begin : high - begin]))

    def _noise(self, block: str, numel: int, device: torch.device) -> torch.Tensor:
        """The numbers of a block, from 0 to 65535, int32."""
        digest = hashlib.blake2b(
            f"{self._seed} {self._step} {block}".encode(), digest_size=8
        ).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big", signed=True))
        return torch.randint(
            1 << 16, (numel,), dtype=torch.int32, device=device, generator=generator
        )


def rounded(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """`values` (fp32) rounded to numbers of bf16, as fp32.

    `noise`: int32, from 0 to 65535, of the same shape.
    """
    # A bf16 number is the upper half of an fp32 one. A carry out of the lower half goes to the next
    # bf16 number.
    bits = (values.view(torch.int32) + noise).bitwise_and_(-(1 << 16))
    return torch.where(values.isfinite(), bits.view(torch.float32), values)
