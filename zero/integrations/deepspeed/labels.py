"""The attributes by which scripts know a sharded parameter: `ds_status`, `ds_tensor` and the like.

The engine reads none of them. `zero.core.views` calls two functions of this file when values are
shown or hidden, and when a group's shard has a new place. How groups are made and gathered is not
known here."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from zero.core import views
from zero.core.layout import Piece

_ids = itertools.count()


class ZeroParamStatus(Enum):
    """What `param.ds_status` says: whether a parameter shows its values."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3  # not available, and being gathered


_STATUS = {
    views.Shown.VALUES: ZeroParamStatus.AVAILABLE,
    views.Shown.NAN: ZeroParamStatus.NOT_AVAILABLE,
    views.Shown.NAN_UNTIL_GATHERED: ZeroParamStatus.INFLIGHT,
}


def _set_status(param: nn.Parameter, shown: views.Shown) -> None:
    param.ds_status = _STATUS[shown]


def _label(
    params: Sequence[nn.Parameter], shard: torch.Tensor, pieces: Sequence[Piece], persistent: bool
) -> None:
    """Set the attributes that do not change with the state; `pieces` is what `shard` holds.

    `ds_tensor` is this rank's part of the parameter, 1-D and possibly empty, and
    `partition_numel()` its size. For the only parameter of a group it is the whole shard, padding
    included: there a new `ds_tensor.data` replaces the values."""
    for param in params:
        if not hasattr(param, "ds_id"):
            param.ds_id = next(_ids)
        param.ds_numel = param.numel()
        param.ds_shape = param.shape
        param.ds_persist = persistent
        param.ds_tensor = shard[:0]
    for piece in pieces:
        params[piece.slot].ds_tensor = shard[piece.start : piece.start + piece.numel]
    if len(params) == 1:
        # A persistent shard is a part of the unsharded buffer, and must stay one.
        params[0].ds_tensor = shard[:] if persistent else shard
    for param in params:
        param.partition_numel = functools.partial(
            int, param.ds_tensor.numel()
        )  # no reference to the shard


def label_whole(param: nn.Parameter) -> None:
    """Set the attributes of an ordinary parameter, which shows its values always."""
    _label([param], param.detach().view(-1), [], persistent=True)
    _set_status(param, views.Shown.VALUES)


def register() -> None:
    """From now on, sharded parameters get these attributes, whoever makes their group."""
    views.observe(_set_status, _label)
