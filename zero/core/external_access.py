"""Parameters that are read outside of their own modules' calls, and reads that got no gradient.

This file knows nothing about modules or the order of reductions.

[Note: reads] A parameter may be read in another module's forward (`self.embedding.weight`), in a
loss after the model's forward, or may be returned by its module. Its group is then unsharded and
stays so until as many backwards have ended as there were forwards, because it is unknown which
backward still needs it. Between passes such a read is an error, because a rank may read
alone, and its all-gather would then wait for the others."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.core.gathering import Gathering
from zero.core.param_group import ParamGroup
from zero.core.sharded_param import PlaceholderView, local

logger = logging.getLogger("zero")


def tensors_in(
    value: object, in_objects: bool = False, known: set[int] | None = None
) -> Iterator[torch.Tensor]:
    """The tensors in a nest of tuples, lists, sets, mappings and dataclasses.

    `in_objects`: also those in attributes of any other object, except modules. `known`: the `id`s
    of objects not to look into; the objects that were looked into are added to it."""
    known = set() if known is None else known
    items: Iterable[object]
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (tuple, list, set, frozenset)):
        items = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif (is_dataclass(value) and not isinstance(value, type)) or (
        in_objects and not isinstance(value, _WITHOUT_RESULTS)
    ):
        items = _attributes(value)
    else:
        return
    if id(value) in known:
        return
    known.add(id(value))
    for item in items:
        yield from tensors_in(item, in_objects, known)


_WITHOUT_RESULTS = (str, bytes, int, float, type(None), type, nn.Module, FunctionType, ModuleType)


def _attributes(value: object) -> list[object]:
    """What an object keeps, in its `__dict__` or in slots."""
    slots: list[str] = []
    for kind in type(value).__mro__:
        names = getattr(kind, "__slots__", ())
        slots += [names] if isinstance(names, str) else names
    kept = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*kept, *getattr(value, "__dict__", {}).values()]


def tensors_with_grad(value: object, **options: Any) -> Iterator[torch.Tensor]:
    """Those of `tensors_in` that require grad."""
    return (tensor for tensor in tensors_in(value, **options) if tensor.requires_grad)


def groups_shown_by(value: object, groups: Sequence[ParamGroup]) -> list[ParamGroup]:
    """Those of `groups` whose parameters, or views of them, are in `value`: a module may return
    them, or keep them.
    """
    tensors = [local(tensor) for tensor in tensors_in(value, in_objects=True)]
    # By the object, because storages that are freed have no address. The result of a collective
    # that is not awaited yet has no storage of its own.
    storages = {
        tensor.untyped_storage()._cdata
        for tensor in tensors
        if tensor.layout is torch.strided
        and not isinstance(tensor, PlaceholderView)
        and not is_traceable_wrapper_subclass(tensor)
        and not is_functorch_wrapped_tensor(tensor)
    }
    return [group for group in groups if group.full.untyped_storage()._cdata in storages]


class OutsideReads:
    """Holds the groups of parameters that were read outside of their modules' calls."""

    def __init__(self, gathering: Gathering):
        self._gathering = gathering
        self.held: set[ParamGroup] = set()
        # In the order of the first read. No call of a module shows when a backward needs these
        # groups.
        self._needed_in_backward: dict[ParamGroup, None] = {}
        # Likewise, but only of graphs whose backward has not ended.
        self._in_graphs: dict[ParamGroup, None] = {}

    def hold(self, group: ParamGroup) -> None:
        """Unshard the group until `release`."""
        if torch.is_grad_enabled():
            self._needed_in_backward[group] = None
        self._hold(group)

    def hold_for_graph(self, group: ParamGroup) -> None:
        """The same for a group whose weights a graph has saved, and again for its backward."""
        self._in_graphs[group] = None
        self._hold(group)

    def _hold(self, group: ParamGroup) -> None:
        if group not in self.held:
            self._gathering.unshard(group)
            self.held.add(group)

    def begin_backward(self) -> None:
        """Hold all groups that any forward has read this way: the backward may need them at any
        moment.
        """
        for group in list(self._needed_in_backward):
            self.hold(group)
        for group in self._in_graphs:
            self._hold(group)

    def end_backwards(self) -> None:
        """No graph waits for its backward any more."""
        self._in_graphs.clear()

    def release(self) -> None:
        for group in sorted(self.held, key=lambda group: group.serial):
            self._gathering.release(group)
        self.held.clear()


class MissingGradients:
    """Warns once of each trainable parameter that a training forward read and that got no
    gradient: parameter number i of a group for each (group, i) that is left in `waiting`.
    """

    def __init__(self) -> None:
        self.waiting: set[tuple[ParamGroup, int]] = set()
        self._told: set[str] = set()

    def warn(self) -> None:
        """The last backward of the forwards is over."""
        trained = ((group, i) for group, i in self.waiting if group.trainable)
        wanting = {g.param_names[i] for g, i in trained if g.params[i].requires_grad}
        names = sorted(wanting - self._told)
        self._told.update(names)
        if names:
            logger.warning(
                "a training forward read %s%s, but backward gave no gradient: is the result unused "
                "or detached?",
                ", ".join(map(repr, names[:5])),
                f" and {len(names) - 5} more" * (len(names) > 5),
            )
