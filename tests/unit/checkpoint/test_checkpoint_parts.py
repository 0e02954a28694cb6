"""Parts of a parameter that was cut over ranks are joined."""

import pytest
import safetensors.torch
import torch

from zero.checkpoint.files import join
from zero.checkpoint.manifest import STORABLE, itemsize
from zero.checkpoint.values import dtype_name


@pytest.mark.parametrize(
    ("shape", "dim", "blocks"),
    [
        *(((6, 4), 0, 1), ((6, 4), 1, 2), ((3, 8, 4), 1, 2), ((3, 8, 4), 2, 1), ((8,), 0, 2)),
        *(((5, 3), 0, 1), ((5, 3), 1, 1)),  # parts of unequal length
    ],
)
def test_the_whole_comes_back(shape, dim, blocks):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    of_blocks = [block.chunk(2, dim) for block in whole.chunk(blocks, dim)]
    parts = [
        torch.cat([pieces[rank] for pieces in of_blocks], dim).reshape(-1) for rank in range(2)
    ]
    assert torch.equal(join(parts, torch.Size(shape), dim, blocks), whole)


def test_the_dtypes_are_those_of_safetensors():
    types = safetensors.torch._TYPES.items()
    assert {dtype_name(dtype): name for name, dtype in types} == STORABLE
    assert all(itemsize(dtype_name(dtype)) == dtype.itemsize for _, dtype in types)
