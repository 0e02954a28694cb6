"""The attributes by which scripts recognize a sharded parameter, such as `ds_status` and
`ds_tensor`.

The engine sets and reads none of them. They are attributes of torch's tensors, computed from the
parameter's group whenever a script reads them. A tensor without a group does not have them:
`hasattr(tensor, "ds_id")` is False, until a script sets one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn

from zero.core.param_group import ParamGroup, State, owning_group
from zero.core.sharded_param import ShardedParameter

_ids = itertools.count()


class ZeroParamStatus(Enum):
    """What `param.ds_status` says: whether a parameter shows its values."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3  # not available, and being gathered


def _status(param: nn.Parameter, group: ParamGroup | None) -> ZeroParamStatus:
    if group is None or not isinstance(param, ShardedParameter):
        return ZeroParamStatus.AVAILABLE
    is_gathering = group.state is State.GATHERING
    return ZeroParamStatus.INFLIGHT if is_gathering else ZeroParamStatus.NOT_AVAILABLE


def _shard(param: nn.Parameter, group: ParamGroup | None) -> torch.Tensor:
    """This rank's part of the parameter, 1-D and possibly empty.

    For the only parameter of a group it is the whole shard, padding included: there a new
    `ds_tensor.data` replaces the values. A persistent shard is a part of the unsharded buffer, and
    must stay one."""
    if group is None or group.shard is None:
        return param.detach().view(-1)
    group.wait_for_update()
    if len(group.params) == 1:
        return group.shard[:] if group.persistent else group.shard
    for piece in group.pieces:
        if piece.slot == group.index[param]:
            return group.shard[piece.start : piece.start + piece.numel]
    return group.shard[:0]


_LABELS: dict[str, Callable[[nn.Parameter, ParamGroup | None], Any]] = {
    "ds_id": lambda param, group: vars(param).setdefault("_ds_id", next(_ids)),
    "ds_status": _status,
    "ds_tensor": _shard,
    "ds_shape": lambda param, group: param.shape,
    "ds_numel": lambda param, group: param.numel(),
    "ds_persist": lambda param, group: group is None or group.persistent,
    "partition_numel": lambda param, group: _shard(param, group).numel,
}


def label_whole(param: nn.Parameter) -> None:
    """Give an ordinary parameter, which shows its values always, the same attributes."""
    vars(param)["_ds_whole"] = True


def _label(name: str) -> property:
    """An attribute that is computed, unless a script has set one of this name on the tensor.

    torch.compile takes only descriptors with a setter.
    """

    def read(param: nn.Parameter) -> Any:
        if name in (own := vars(param)):
            return own[name]
        group = owning_group(param)
        if group is None and "_ds_whole" not in own:
            raise AttributeError(f"{type(param).__name__!r} object has no attribute {name!r}")
        return _LABELS[name](param, group)

    def write(param: nn.Parameter, value: object) -> None:
        vars(param)[name] = value

    def remove(param: nn.Parameter) -> None:
        vars(param).pop(name, None)

    return property(read, write, remove)


def register() -> None:
    """From now on, sharded parameters have these attributes, whoever makes their group."""
    for name in _LABELS:
        setattr(torch.Tensor, name, _label(name))
