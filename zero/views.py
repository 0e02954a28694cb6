"""What the parameters of one unit show: views of the unsharded buffer, NaN, or a copy of one parameter.

This file also sets the attributes that scripts read from sharded parameters (`ds_status`, `ds_tensor` and the like).
Their names are DeepSpeed's; the engine writes them and never reads them. This file knows nothing of units and their
states.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from enum import Enum

import torch
from torch import nn

from zero.layout import Piece, UnitLayout
from zero.parameters import ParameterOwner, hide, owner_of, placeholder, show


class ZeroParamStatus(Enum):
    """What `param.ds_status` says: whether a parameter shows its values."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3  # shows no values: the all-gather is under way


_ids = itertools.count()


class ParameterViews:
    """Sets what `params` show, as long as `owner` is the one that holds their values.

    Args: full: the unsharded buffer (1-D), whose views they show. Attributes: single: copies of single parameters
    outside of the buffer, by index; they are shown while the rest is sharded.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], layout: UnitLayout, full: torch.Tensor, owner: ParameterOwner
    ) -> None:
        self._params, self._layout, self._owner = params, layout, owner
        self._placeholders = [placeholder(slot.shape, full.dtype, full.device) for slot in layout.slots]
        self.single: dict[int, torch.Tensor] = {}
        self.set_buffer(full)

    def set_buffer(self, full: torch.Tensor) -> None:
        """From the next `show_values` on, show views of `full`."""
        self._views = [full.narrow(0, slot.offset, slot.numel).view(slot.shape) for slot in self._layout.slots]

    def forget_buffer(self) -> None:
        """Drop the views, which keep the buffer's memory alive: nothing will be shown any more."""
        self._views = []

    def show_values(self) -> None:
        for param, view in zip(self._params, self._views, strict=True):
            if owner_of(param) is self._owner:
                show(param, view)
        self.set_status(ZeroParamStatus.AVAILABLE)

    def hide_values(self) -> None:
        """Show NaN, or a single parameter's copy."""
        for param, nan in zip(self._params, self._placeholders, strict=True):
            if owner_of(param) is self._owner:
                hide(param, nan)
        self.set_status(ZeroParamStatus.NOT_AVAILABLE)
        self.show_single(self.single)

    def show_single(self, indices: Iterable[int]) -> None:
        for i in indices:
            show(self._params[i], self.single[i])
            self._params[i].ds_status = ZeroParamStatus.AVAILABLE

    def hide_single(self, index: int) -> None:
        if owner_of(self._params[index]) is self._owner:
            hide(self._params[index], self._placeholders[index])
            self._params[index].ds_status = ZeroParamStatus.NOT_AVAILABLE

    def set_status(self, status: ZeroParamStatus) -> None:
        for param in self._params:
            if owner_of(param) is self._owner:
                param.ds_status = status

    def label(self, shard: torch.Tensor, pieces: Sequence[Piece], persistent: bool) -> None:
        """Set the attributes that do not change with the state; `pieces` is what `shard` holds.

        `ds_tensor` is this rank's part of the parameter, 1-D and possibly empty, and `partition_numel()` its size. For
        the only parameter of a unit it is the whole shard, padding included: there a new `ds_tensor.data` replaces the
        values.
        """
        for param in self._params:
            if not hasattr(param, "ds_id"):
                param.ds_id = next(_ids)
            param.ds_numel, param.ds_shape, param.ds_persist = param.numel(), param.shape, persistent
            param.ds_tensor = shard[:0]
        for piece in pieces:
            self._params[piece.slot].ds_tensor = shard[piece.start : piece.start + piece.numel]
        if len(self._params) == 1:
            # A persistent shard is a part of the buffer, and must stay one.
            self._params[0].ds_tensor = shard[:] if persistent else shard
        for param in self._params:
            param.partition_numel = functools.partial(int, param.ds_tensor.numel())  # no reference to the shard
