"""Which rank updates which whole tensor, and in which part of a step. Pure arithmetic: nothing is
moved here.

[Note: owners] A tensor stays on the rank that holds most of it, as long as this rank then owns
little more than its share. Else it goes to the rank that owns least. So most tensors that lie
within one shard do not move, and each rank has about the same work. Groups are balanced one by one,
since the work for an element differs between them: Muon multiplies matrices for some groups, and
AdamW updates the others.

[Note: parts] A step updates the groups in parts: while one is updated, the tensors of its
neighbours move. In each part ranks wait for each other. So each part is balanced alone, and has
enough matrices for that. On many ranks this leaves one part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from zero.core.layout import GroupLayout

# Most parts of a step; the least number of elements of a part, and of matrices for each rank.
PARTS, LEAST_ELEMENTS, LEAST_MATRICES = 8, 1 << 20, 4
# How far a rank may own more than its share of a group.
SLACK = 1.05


def parts(layouts: Sequence[GroupLayout]) -> list[int]:
    """The number of the part in which each group is updated, in their order."""
    elements = [layout.numel for layout in layouts]
    matrices = sum(len(slot.shape) > 1 for layout in layouts for slot in layout.slots)
    total, ranks = sum(elements), max((layout.world_size for layout in layouts), default=1)
    count = max(1, min(PARTS, total // LEAST_ELEMENTS, matrices // (LEAST_MATRICES * ranks)))
    return [before * count // total for before in list(accumulate(elements, initial=0))[:-1]]


def owners(held: Sequence[Sequence[int]], group_of: Sequence[object]) -> list[int]:
    """The owner of each tensor.

    Args: held: for each tensor its elements on each rank; group_of: for each tensor the key of
    those with which it is balanced, such as its part and param group."""
    ranks, found = range(len(held[0]) if held else 0), [0] * len(held)
    total = [0] * len(ranks)
    for group in sorted(set(group_of)):
        members = sorted(
            (i for i in range(len(held)) if group_of[i] == group), key=lambda i: -sum(held[i])
        )
        sizes = [sum(held[i]) for i in members]
        most = max(sizes[0], SLACK * sum(sizes) / len(ranks))
        load = [0] * len(ranks)
        for i, size in zip(members, sizes, strict=True):
            owner = max(ranks, key=lambda rank: (held[i][rank], -load[rank], -total[rank]))
            if load[owner] + size > most:
                owner = min(ranks, key=lambda rank: (load[rank], total[rank], -held[i][rank]))
            found[i] = owner
            load[owner] += size
            total[owner] += size
    return found
