"""What the parameters of one group show: views of the unsharded buffer, NaN, or a copy of one
parameter.

Observers hear of each change, so `zero.integrations.deepspeed` can set `ds_*` attributes. This file
knows nothing of groups and their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import torch
from torch import nn

from zero.core.layout import GroupLayout, Piece
from zero.core.sharded_param import ParameterOwner, hide, owner_of, placeholder, show


class Shown(Enum):
    """What a parameter shows."""

    VALUES = "its values"
    NAN = "NaN"
    NAN_UNTIL_GATHERED = "NaN, while its values are being gathered"


# Called when a parameter shows something else.
_shown_changed: list[Callable[[nn.Parameter, Shown], None]] = []
# Called when a shard has a new place: parameters of the group, shard, pieces in it, whether the
# group is persistent.
_shard_placed: list[
    Callable[[Sequence[nn.Parameter], torch.Tensor, Sequence[Piece], bool], None]
] = []


def observe(
    shown_changed: Callable[[nn.Parameter, Shown], None],
    shard_placed: Callable[[Sequence[nn.Parameter], torch.Tensor, Sequence[Piece], bool], None],
) -> None:
    """Register functions that give parameters attributes of their own; the engine does not look at
    those.
    """
    _shown_changed.append(shown_changed)
    _shard_placed.append(shard_placed)


class ParameterViews:
    """Sets what `params` show, as long as `owner` is the one that holds their values.

    Args: full: the unsharded buffer (1-D), whose views they show. Attributes: single: copies of
    single parameters outside of the buffer, by index; they are shown while the rest is sharded."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: GroupLayout,
        full: torch.Tensor,
        owner: ParameterOwner,
    ) -> None:
        self._params = params
        self._layout = layout
        self._owner = owner
        self._placeholders = [
            placeholder(slot.shape, full.dtype, full.device) for slot in layout.slots
        ]
        self.single: dict[int, torch.Tensor] = {}
        self.set_buffer(full)

    def set_buffer(self, full: torch.Tensor) -> None:
        """From the next `show_values` on, show views of `full`."""
        self._views = [
            full.narrow(0, slot.offset, slot.numel).view(slot.shape) for slot in self._layout.slots
        ]

    def forget_buffer(self) -> None:
        """Drop the views, which keep the buffer's memory alive: nothing will be shown any more."""
        self._views = []

    def show_values(self) -> None:
        for param, view in zip(self._params, self._views, strict=True):
            if owner_of(param) is self._owner:
                show(param, view)
        self.say(Shown.VALUES)

    def hide_values(self) -> None:
        """Show NaN, or a single parameter's copy."""
        for param, nan in zip(self._params, self._placeholders, strict=True):
            if owner_of(param) is self._owner:
                hide(param, nan)
        self.say(Shown.NAN)
        self.show_single(self.single)

    def show_single(self, indices: Iterable[int]) -> None:
        for i in indices:
            show(self._params[i], self.single[i])
            _say(self._params[i], Shown.VALUES)

    def hide_single(self, index: int) -> None:
        if owner_of(self._params[index]) is self._owner:
            hide(self._params[index], self._placeholders[index])
            _say(self._params[index], Shown.NAN)

    def say(self, shown: Shown) -> None:
        """Tell the observers what the parameters show."""
        for param in self._params:
            if owner_of(param) is self._owner:
                _say(param, shown)

    def shard_was_placed(
        self, shard: torch.Tensor, pieces: Sequence[Piece], persistent: bool
    ) -> None:
        """Tell the observers where the group's shard is; `pieces` is what it holds."""
        for tell in _shard_placed:
            tell(self._params, shard, pieces, persistent)


def _say(param: nn.Parameter, shown: Shown) -> None:
    for tell in _shown_changed:
        tell(param, shown)
