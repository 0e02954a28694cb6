"""16-bit consolidation: the whole model's weights on one rank, gathered unit by unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zero.unit import Unit, unit_of


def consolidated_state_dict(
    model: nn.Module, units: Sequence[Unit], rank: int, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor] | None:
    """The model's state dict with full values in host memory on rank 0, and None on all other ranks.

    Parameters have the dtype they are trained in; tied ones appear under each of their names as one tensor. Besides
    the result, a rank holds one gathered unit at a time. Every rank must call it.
    """
    values: dict[nn.Parameter, torch.Tensor] = {}
    for unit in units:
        if exclude_frozen_parameters and not unit.trainable:
            continue
        with unit.exposed():
            if rank == 0:
                for param in unit.params:
                    values[param] = param.detach().to("cpu", copy=True)
    if rank != 0:
        return None
    state = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, nn.Parameter):
            state[name] = value
        elif unit_of(value) is None:
            if value.requires_grad or not exclude_frozen_parameters:
                state[name] = value.detach()
        elif value in values:
            state[name] = values[value]
    return state
