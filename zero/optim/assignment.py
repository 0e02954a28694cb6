"""Which rank updates which whole tensor. Pure arithmetic: nothing is moved here.

A tensor stays on the rank that holds most of it, as long as this rank then owns little more than
its share. Else it goes to the rank that owns least. So most tensors that lie within one shard do
not move, and each rank has about the same work. Groups are balanced one by one, since the work for
an element differs between them: Muon multiplies matrices for some groups, and AdamW updates the
others."""

from __future__ import annotations

from collections.abc import Sequence

# How far a rank may own more than its share of a group.
SLACK = 1.05


def owners(held: Sequence[Sequence[int]], group_of: Sequence[int]) -> list[int]:
    """The owner of each tensor.

    Args: held: for each tensor its elements on each rank; group_of: for each tensor the number of
    those with which it is balanced, such as its param group."""
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
