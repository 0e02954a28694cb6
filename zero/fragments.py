"""DeepSpeed's `safe_*` functions, which read and write a sharded parameter's fp32 value, gradient
and optimizer state.

    safe_get_full_fp32_param(param)              safe_set_full_fp32_param(param, value)
    safe_get_full_grad(param)                    safe_set_full_grad(param, value)
    safe_get_full_optimizer_state(param, key)    safe_set_full_optimizer_state(param, value, key)

*full*: the whole parameter, in its shape. Every rank must call, and gets (or gives) the same.
*local* in the place of *full*: this rank's part, 1-D and possibly empty, in the layout of
`param.ds_tensor`. Nothing is sent, except that a parameter follows its new fp32 value: every rank
must call `safe_set_local_fp32_param`.

The result is an fp32 copy, or None for a parameter that no engine's optimizer trains. A gradient is
also None before the first backward of a step and after the step. It is the mean over ranks, before
clipping, without the loss scale. The key of an optimizer state is torch's name of it, such as
"exp_avg". `zero.optim.param_access` knows how values are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from zero.optim.param_access import FP32, GRADIENT, ParameterState


def _functions(kind: str) -> tuple[Callable, Callable, Callable, Callable]:
    """(get full, get local, set full, set local) of one kind of value."""
    return (
        lambda param: ParameterState(param, kind).read_full(),
        lambda param: ParameterState(param, kind).read_local(),
        lambda param, value: ParameterState(param, kind).write_full(value),
        lambda param, value: ParameterState(param, kind).write_local(value),
    )


(
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
) = _functions(FP32)
safe_get_full_grad, safe_get_local_grad, safe_set_full_grad, safe_set_local_grad = _functions(
    GRADIENT
)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    return ParameterState(param, optim_state_key).read_full()


def safe_get_local_optimizer_state(
    param: nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    return ParameterState(param, optim_state_key).read_local()


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    ParameterState(param, optim_state_key).write_full(value)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    ParameterState(param, optim_state_key).write_local(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Replace each accumulated gradient by `update_func(gradient, param)`.

    Every rank must make the same call.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))
