"""The sums that identify a quantized base."""

import torch

from zero.checkpoint.base import CHUNK, MODULUS, positional_sum, total


def test_sums_do_not_depend_on_how_the_bytes_are_sharded_and_do_on_their_order():
    values = torch.randint(0, 256, (2 * CHUNK + 6,), dtype=torch.uint8)
    whole = total([{"layer": (values.numel(), positional_sum(values, 0))}])
    parts = values.split([10, CHUNK + 5, CHUNK - 9])
    of_ranks = [
        {"layer": (values.numel(), positional_sum(part, position))}
        for part, position in zip(parts, (0, 10, CHUNK + 15), strict=True)
    ]
    assert total(of_ranks) == whole
    assert total(of_ranks)["layer"][1] < MODULUS
    shuffled = values[torch.randperm(values.numel())]
    assert total([{"layer": (values.numel(), positional_sum(shuffled, 0))}]) != whole


def test_elements_of_several_bytes_are_summed_by_byte():
    values = torch.randn(1000, dtype=torch.bfloat16)
    assert positional_sum(values, 0) == positional_sum(values.view(torch.uint8), 0)
