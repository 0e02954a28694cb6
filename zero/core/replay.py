"""Records the actions of forward and backward passes, so that a rank can replay them.

A rank that can no longer compute would leave the others waiting for its shards and gradients. From
the recording of an earlier pass of the same kind it can replay the rest without computing: its
policies make the same decisions as those of the other ranks, and start the same collectives.

An action that fails half-way, for example because there is no memory for a buffer, must be
repeatable. A policy therefore records what it has done only once nothing can fail any more."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableSequence
from contextlib import contextmanager

from zero.core.param_group import ParamGroup

Action = tuple[Callable[..., None], tuple[object, ...]]


class PassRecorder:
    """Keeps the last complete recording of each kind.

    Attributes:
        done: to which policies append what they have done. Outside of `recording`, nothing is kept.
    """

    def __init__(self) -> None:
        self._recordings: dict[Hashable, list[Action]] = {}
        self._kind: Hashable = None
        self.done: MutableSequence[Action] = deque(maxlen=0)

    @contextmanager
    def recording(self, kind: Hashable) -> Iterator[None]:
        """Context of a forward or backward of `kind`."""
        self._kind, self.done = kind, []
        try:
            yield
        finally:
            self._kind, self.done = None, deque(maxlen=0)

    @property
    def is_recording(self) -> bool:
        return self._kind is not None

    @property
    def can_replay(self) -> bool:
        """Whether a pass of the same kind has completed."""
        return self._kind in self._recordings

    def complete(self) -> None:
        """The forward or backward has ended without an error: keep its recording."""
        self._recordings[self._kind] = list(self.done)

    def replay_rest(self) -> None:
        """Do what this pass has not done yet, as in the last one of the same kind.

        The actions of one object have an order, those of several have none among each other: the
        last gradient of a block may come before or after the next block's gather, and gathers and
        reductions have connections of their own. Raises RuntimeError if this pass has done
        something else so far.
        """
        recorded = self._recordings.get(self._kind, self.done)
        of_recorded, of_done = _by_owner(recorded), _by_owner(self.done)
        if any(of_recorded[each][: len(done)] != done for each, done in of_done.items()):
            raise RuntimeError(
                "this rank ran out of memory, and others may wait for it forever, because this "
                f"{self._kind} runs other modules than the last one"
            )
        rest = list(recorded)
        for done in self.done:
            rest.remove(done)
        for action, args in rest:
            action(*args)

    def names(self) -> dict[Hashable, dict[str, list[tuple[str, list[str]]]]]:
        """Describe the recordings in a form that ranks can compare."""
        return {
            kind: {
                owner: [
                    (action.__name__, [each.name for each in args if isinstance(each, ParamGroup)])
                    for action, args in of_owner
                ]
                for owner, of_owner in _by_owner(actions).items()
            }
            for kind, actions in self._recordings.items()
        }


def _by_owner(actions: Iterable[Action]) -> dict[str, list[Action]]:
    """The actions by the class of the object whose methods they are; an engine has one of each."""
    found: dict[str, list[Action]] = defaultdict(list)
    for each in actions:
        found[type(getattr(each[0], "__self__", None)).__name__].append(each)
    return found
