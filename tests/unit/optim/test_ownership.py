"""Which rank owns which whole tensor: pure arithmetic."""

import pytest
import torch

from zero.core.layout import GroupLayout
from zero.optim.assignment import LEAST_ELEMENTS, PARTS, SLACK, owners, parts


def test_a_tensor_in_one_shard_stays_there():
    assert owners([[8, 0], [0, 8], [8, 0], [0, 8]], [0] * 4) == [0, 1, 0, 1]


def test_a_cut_tensor_goes_where_most_of_it_is():
    assert owners([[6, 0, 0], [2, 4, 0], [0, 2, 4]], [0, 0, 0]) == [0, 1, 2]


def test_tensors_cut_evenly_are_balanced():
    held = [[size // 4] * 4 for size in (400, 400, 200, 200, 100, 100, 100, 100)]
    found = owners(held, [0] * len(held))
    loads = [
        sum(sum(each) for each, owner in zip(held, found, strict=True) if owner == rank)
        for rank in range(4)
    ]
    assert sorted(loads) == [400] * 4


def test_a_rank_with_a_large_tensor_gives_others_away():
    found = owners([[50, 50], [30, 0], [20, 0], [0, 30], [0, 20]], [0] * 5)
    assert found[1:] == [1 - found[0]] * 4


def test_each_group_is_balanced_by_itself():
    held = [[50, 50], [20, 0], [20, 0], [0, 20], [0, 20]]
    assert owners(held, [0, 1, 1, 1, 1])[1:] == [0, 0, 1, 1]


def test_no_rank_owns_much_more_than_its_share():
    sizes = [1 + (37 * i) % 90 for i in range(60)]
    held = [[size if rank == i % 3 else 0 for rank in range(3)] for i, size in enumerate(sizes)]
    found = owners(held, [0] * 60)
    loads = [
        sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank)
        for rank in range(3)
    ]
    assert max(loads) <= SLACK * sum(sizes) / 3 + max(sizes)


def test_without_tensors_there_are_no_owners():
    assert owners([], []) == []


def layouts(groups, elements, matrices, ranks):
    """Return so many groups: a vector, and small matrices in it, of so many elements together."""
    shapes = [torch.Size((2, 2))] * matrices + [torch.Size((elements - 4 * matrices,))]
    return [GroupLayout(shapes, ranks)] * groups


def test_parts_are_consecutive_and_about_equal():
    found = parts(layouts(40, LEAST_ELEMENTS, 7, 4))
    assert found == sorted(found) and {found.count(part) for part in range(PARTS)} == {5}


@pytest.mark.parametrize(
    ("elements", "matrices", "ranks", "count"),
    [
        (LEAST_ELEMENTS // 10, 7, 2, 1),  # too small
        (LEAST_ELEMENTS, 7, 64, 1),  # 70 matrices on 64 ranks
        (LEAST_ELEMENTS, 7, 6, 2),  # 24 matrices are the least of a part
        (LEAST_ELEMENTS, 0, 2, 1),
    ],
)
def test_a_part_is_worth_its_call_and_can_be_balanced(elements, matrices, ranks, count):
    assert set(parts(layouts(10, elements, matrices, ranks))) == set(range(count))


def test_without_groups_there_are_no_parts():
    assert parts([]) == []
