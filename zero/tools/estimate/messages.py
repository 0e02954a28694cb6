"""Bytes on the device that all-gathers and reductions take besides what they read and fill, for
`zero estimate`.

As `zero/comm/communicator.py` and, for codes, `zero/comm/quantized.py` allocate them on an
accelerator."""

from __future__ import annotations

from typing import NamedTuple

from zero.comm.quantized import AT_A_TIME_ELSEWHERE, BLOCK, message_bytes
from zero.config import Config
from zero.tools.estimate.states import Kept


class Extra(NamedTuple):
    """Bytes of one operation. held: from its start to its end. start, end: temporary ones at these
    moments.
    """

    held: int = 0
    start: int = 0
    end: int = 0


def of_gather(group: Kept, config: Config) -> Extra:
    """Of an all-gather for use: all ranks' codes, and what it takes to make them."""
    zero, layout = config.zero_optimization, group.layout
    coded = zero.zero_quantized_weights or (
        zero.zero_quantized_nontrainable_weights and not group.trainable
    )
    if not coded or layout.world_size == 1:
        return Extra()
    numel = layout.shard_numel
    filled_up = 4 * (numel % AT_A_TIME_ELSEWHERE) if numel % BLOCK else 0
    return Extra(
        layout.world_size * message_bytes(numel, 8),
        _encoding(numel, config.compute_dtype.itemsize, 8),
        filled_up,
    )


def of_reduction(group: Kept, config: Config, world_size: int, item: int, adds: bool) -> Extra:
    """Of a reduction.

    Args: item: bytes of an element that travels uncoded; adds: to earlier micro-batches' sums.
    """
    ranks, kept_item = group.layout.world_size, config.gradient_bytes(sums_have_16_bits=True)
    if ranks == 1:
        return Extra()
    numel = group.layout.padded // ranks
    own = (
        numel * kept_item if group.layout.replicated else 0
    )  # the whole result is gathered from this part
    if config.zero_optimization.zero_quantized_gradients:
        coded = _of_coded_reduction(numel, ranks, config, world_size, item, kept_item)
        return coded._replace(held=coded.held + own)
    return Extra(own + (numel * item if adds or item != kept_item else 0))


def _of_coded_reduction(
    numel: int, ranks: int, config: Config, world_size: int, item: int, kept_item: int
) -> Extra:
    """Codes to and from each rank.

    With second shards, a group of ranks counts as a machine, which sums first.
    """
    zero = config.zero_optimization
    bits, width = zero.zero_quantized_gradient_bits, min(numel, most_columns(config, ranks))
    held, start = 2 * ranks * coded_gradients(numel, ranks, config), _encoding(width, item, bits)
    end = _adding(width, bits) + (4 * width if kept_item != 4 else 0)
    near = zero.second_shards_over(world_size)
    if 1 < near < ranks:
        machines = ranks // near
        held += machines * (4 * numel + 2 * coded_gradients(numel, ranks, config))
        start = max(start, _encoding(width, 4, bits), _adding(width, bits))
    return Extra(held, start, end)


def most_columns(config: Config, ranks: int) -> int:
    """Most elements of one rank in a coded exchange of gradients."""
    return max(BLOCK, config.zero_optimization.reduce_bucket_size // ranks // BLOCK * BLOCK)


def coded_gradients(numel: int, ranks: int, config: Config) -> int:
    """Bytes of the messages with `numel` gradients to one rank."""
    bits, step = config.zero_optimization.zero_quantized_gradient_bits, most_columns(config, ranks)
    whole, rest = divmod(numel, step)
    return whole * message_bytes(step, bits) + message_bytes(rest, bits)


def _encoding(numel: int, item: int, bits: int) -> int:
    """Temporary bytes of `zero.comm.quantized.encode`, of values of `item` bytes."""
    part = min(numel, AT_A_TIME_ELSEWHERE)
    each = 4 + (4 if item != 4 else 0) + (item if numel % BLOCK else 0) + (2.5 if bits == 4 else 0)
    former = 4 + (bits == 4) if numel > part else 0
    return round(part * (each + former))


def _adding(numel: int, bits: int) -> int:
    """Temporary bytes of `zero.comm.quantized.decode`, which adds the values."""
    part = min(numel, AT_A_TIME_ELSEWHERE)
    return part * (4 + (bits == 4)) * (2 if numel > part else 1)
