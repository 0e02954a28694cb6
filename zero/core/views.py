"""What the parameters of one group show: views of the unsharded buffer, NaN, or a copy of one
parameter.

This file knows nothing of groups and their states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from zero.core.layout import GroupLayout
from zero.core.sharded_param import ParameterOwner, hide, owner_of, placeholder, show


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

    def hide_values(self) -> None:
        """Show NaN, or a single parameter's copy."""
        for param, nan in zip(self._params, self._placeholders, strict=True):
            if owner_of(param) is self._owner:
                hide(param, nan)
        self.show_single(self.single)

    def show_single(self, indices: Iterable[int]) -> None:
        for i in indices:
            show(self._params[i], self.single[i])

    def hide_single(self, index: int) -> None:
        if owner_of(self._params[index]) is self._owner:
            hide(self._params[index], self._placeholders[index])
