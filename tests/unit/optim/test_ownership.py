"""Which rank owns which whole tensor: pure arithmetic."""

from zero.optim.redistribute import SLACK, owners


def test_a_cut_tensor_goes_where_most_of_it_is():
    assert owners([[6, 0, 0], [2, 4, 0], [0, 2, 4]], [0, 0, 0]) == [0, 1, 2]


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
