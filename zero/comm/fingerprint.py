"""Hashes the order of a rank's collectives, which is compared with the other ranks' before each
update.

NCCL, and whatever is made like it, matches the operations of a communicator by their order alone.
Ranks that run different modules get each other's values then: nothing fails, and no host waits. So
each rank folds what it starts into numbers, which the ranks compare."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from zero.comm.watchdog import ADVICE

# Operations that are kept, to find the first one that differs.
KEPT = 20_000
# Python's hash of a text is another one in each process, that of a number is not.
_KINDS: Sequence[str] = (
    "all_gather reduce_scatter broadcast all_reduce all_to_all reduce_replicas".split()
)
# Quantized gradients go by all-to-all. Whole tensors do so too, but in the step, where no reduction
# is under way.
_REDUCTIONS = ("reduce_scatter", "reduce_replicas", "all_to_all")


class NamedGroup:
    """What collectives know of a parameter group, which inherits this.

    Attributes:
        serial: unique, and equal on all ranks.
        name: for messages.
        trainable: whether its gradients are reduced.
    """

    serial: int
    name: str
    trainable: bool


class Operation(NamedTuple):
    """A collective on `numel` elements; `group` is the name of what it exchanges, or empty."""

    kind: str
    numel: int
    group: str

    def __str__(self) -> str:
        return (
            f"{self.kind} of {f'group {self.group!r}, ' if self.group else ''}{self.numel} elements"
        )


class _Channel:
    """The operations of one kind of communicator since the last comparison."""

    def __init__(self) -> None:
        self.digest = self.count = 0
        self.recent: deque[Operation] = deque(maxlen=KEPT)


class CollectiveOrder:
    """What this rank has started since `start_over`, in two channels: reductions have communicators
    of their own.
    """

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        self._channels = _Channel(), _Channel()

    def add(self, kind: str, numel: int, group: NamedGroup | None) -> None:
        """An operation on `numel` elements, of `group` if it is about one."""
        serial, name = (0, "") if group is None else (group.serial, group.name)
        channel = self._channels[kind in _REDUCTIONS]
        channel.digest = hash((channel.digest, _KINDS.index(kind), serial, numel))
        channel.count += 1
        channel.recent.append(Operation(kind, numel, name))

    @property
    def digests(self) -> list[int]:
        """Two 64-bit numbers, equal on all ranks whose communicators were given the same
        operations.
        """
        return [channel.digest for channel in self._channels]

    @property
    def recent(self) -> list[tuple[int, list[Operation]]]:
        """Of each communicator: how many operations there were, and the last ones."""
        return [(channel.count, list(channel.recent)) for channel in self._channels]


def explain(on_rank: Sequence[list[tuple[int, list[Operation]]]]) -> str:
    """Names two ranks whose `recent` differ, given those of all ranks, and their first operations
    that differ.
    """
    rank, where = 1, f"they differ before the last {KEPT}"
    for number, recent in enumerate(on_rank[1:], 1):
        named = [_first_difference(*pair) for pair in zip(on_rank[0], recent, strict=True)]
        if any(named):
            rank, where = number, next(filter(None, named))
            break
    return (
        f"ranks 0 and {rank} have gone different ways through the model. Of their collectives "
        f"since the last step, {where}. The device matches them by their order, so these ranks got "
        f"each other's values. The step was not taken. {ADVICE}"
    )


def _first_difference(
    first: tuple[int, list[Operation]], other: tuple[int, list[Operation]]
) -> str:
    # before the oldest one that both have
    known = max(count - len(recent) for count, recent in (first, other))
    pairs = zip_longest(
        *(recent[known - count + len(recent) :] for count, recent in (first, other))
    )
    for number, (one, two) in enumerate(pairs, known + 1):
        if one != two:
            return (
                f"number {number} was {one or 'not there'} on the first, and "
                f"{two or 'not there'} on the other"
            )
    return ""
