"""The course of a forward or backward: what it did to groups, in order.

A rank that cannot go on computing would leave the others waiting for its shards and gradients. With
the course of an earlier forward or backward of the same kind it can go on without computing: the
policies take the same decisions as on the other ranks, and start the same collectives.

So each act can be repeated if it has failed half-way, for example because memory was not enough for
a buffer: a policy notes what it has done when nothing can fail any more. This file knows neither
the policies nor what has failed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from zero.core.param_group import ParamGroup

Act = tuple[Callable[..., None], tuple[object, ...]]


class Course:
    """Keeps the course of what `following` surrounds, and of the last one of each kind that came to
    its end.
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
        """Whether one of the same kind has come to its end."""
        return self._kind in self._known

    def note(self, act: Callable[..., None], *args: object) -> None:
        """`act(*args)` has been done."""
        if self.is_followed:
            self._done.append((act, args))

    def ends(self) -> None:
        """The forward or backward was complete."""
        self._known[self._kind] = self._done

    def go_on(self) -> None:
        """Do what is left, as in the last one of the same kind. Raises RuntimeError if this one has
        gone another way.
        """
        known, count = self._known.get(self._kind, self._done), len(self._done)
        if known[:count] != self._done:
            raise RuntimeError(
                "memory was not enough, and other ranks may wait for this one for ever: it goes "
                f"another way through the model in this {self._kind} than in the last one"
            )
        for act, args in known[count:]:
            act(*args)

    def names(self) -> dict[Hashable, list[tuple[str, list[str]]]]:
        """The known courses, in words that other ranks understand."""
        return {
            kind: [
                (act.__name__, [each.name for each in args if isinstance(each, ParamGroup)])
                for act, args in acts
            ]
            for kind, acts in self._known.items()
        }
