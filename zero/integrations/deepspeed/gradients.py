"""DeepSpeed's functions for gradients.

A script's own gradients are those of parameters outside any engine. An engine clips by
`gradient_clipping` itself, and its parameters show no gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero import fragments
from zero.comm import world
from zero.core.param_group import owning_group
from zero.errors import UsageError
from zero.integrations.deepspeed import distributed


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """As `zero.fragments.safe_get_full_grad`.

    Raises UsageError where PEFT's AdaLoRA would compute with a gradient that is gone.
    """
    found = fragments.safe_get_full_grad(param)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if found is None and caller == "peft.tuners.adalora.layer":
        raise UsageError(
            "AdaLoRA's update_and_allocate reads gradients, and the optimizer's step has freed "
            "them: in an own loop, call it between engine.backward and engine.step. The Trainer "
            "has no such moment; train LoRA, or AdaLoRA without a deepspeed configuration"
        )
    return found


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    mpu: Any = None,
) -> torch.Tensor:
    """Scale gradients down to a norm of at most `max_norm`. Returns the norm before, the mean over
    the data-parallel ranks, which must all call it.

    Raises UsageError for an engine's parameters, and for parameters that `mpu` shares.
    """
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise UsageError("clip_grad_norm_: mpu: parameters that ranks share are not supported")
    given: Any = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    params = list(given)
    if any(owning_group(param) is not None for param in params):
        raise UsageError(
            "clip_grad_norm_: these parameters and their gradients belong to an engine; set "
            "gradient_clipping in the configuration"
        )
    grads = [param.grad for param in params if param.grad is not None]
    norm = nn.utils.get_total_norm(grads, norm_type)
    norm = norm.to(world.compute_device())
    if world.is_initialized():
        dist.all_reduce(norm, group=distributed._get_data_parallel_group())
        norm /= distributed._get_data_parallel_world_size()
    nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm
