"""Records the course of a forward or backward: what it did to groups, in order.

A rank that can no longer compute would leave the others waiting for its shards and gradients. Given
the course of an earlier forward or backward of the same kind, it can take part without computing:
its policies make the same decisions as those of the other ranks, and start the same collectives.

An act that fails half-way, for example because there is no memory for a buffer, must be repeatable.
A policy therefore records what it has done only once nothing can fail any more. This file does not
depend on the policies or on the kind of failure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from zero.core.param_group import ParamGroup

Act = tuple[Callable[..., None], tuple[object, ...]]


class Course:
    """Records the course of what `following` surrounds, and keeps the last complete one of each
    kind.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, list[Act]] = {}
        self._kind: Hashable = None
        self._done: list[Act] = []

    @contextmanager
    def following(self, kind: Hashable) -> Iterator[None]:
        """Context of a forward or backward of `kind`."""
        self._kind, self._done = kind, []
        try:
            yield
        finally:
            self._kind = None

    @property
    def is_followed(self) -> bool:
        return self._kind is not None

    @property
    def is_known(self) -> bool:
        """Whether one of the same kind has completed."""
        return self._kind in self._known

    def note(self, act: Callable[..., None], *args: object) -> None:
        """Record that `act(*args)` has been done."""
        if self.is_followed:
            self._done.append((act, args))

    def ends(self) -> None:
        """Record that the forward or backward is complete."""
        self._known[self._kind] = self._done

    def go_on(self) -> None:
        """Do what remains, as in the last one of the same kind.

        Raises RuntimeError if this one has taken a different course.
        """
        known, count = self._known.get(self._kind, self._done), len(self._done)
        if known[:count] != self._done:
            raise RuntimeError(
                "memory was not enough, and other ranks may wait for this one forever: it goes "
                f"another way through the model in this {self._kind} than in the last one"
            )
        for act, args in known[count:]:
            act(*args)

    def names(self) -> dict[Hashable, list[tuple[str, list[str]]]]:
        """Describe the known courses in a form that ranks can compare."""
        return {
            kind: [
                (act.__name__, [each.name for each in args if isinstance(each, ParamGroup)])
                for act, args in acts
            ]
            for kind, acts in self._known.items()
        }
