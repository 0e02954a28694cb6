"""DeepSpeed's `safe_*` functions, which read and write a sharded parameter's fp32 value, gradient and optimizer state.

*full*: the whole parameter, in its shape. Every rank must call, and gets (or gives) the same.
*local*: this rank's part, 1-D and possibly empty, in the layout of `param.ds_tensor`, without communication.

The result is an fp32 copy, or None for a parameter that no engine's optimizer trains. A gradient is also None before
the first backward of a step and after the step. It is the mean over ranks, before clipping, without the loss scale.
`optim_state_key` is torch's name of the state, such as "exp_avg". How values are stored is known to
`zero.parameter_state` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from zero.parameter_state import FP32, GRADIENT, ParameterState


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The parameter's fp32 master."""
    return ParameterState(param, FP32).read_full()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The accumulated mean gradient."""
    return ParameterState(param, GRADIENT).read_full()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """An optimizer state."""
    return ParameterState(param, optim_state_key).read_full()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the parameter's master, and with it the parameter."""
    ParameterState(param, FP32).write_full(value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the accumulated mean gradient."""
    ParameterState(param, GRADIENT).write_full(value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace an element-wise optimizer state."""
    ParameterState(param, optim_state_key).write_full(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each accumulated gradient by `update_func(gradient, param)`. Every rank must call, alike."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the master."""
    return ParameterState(param, FP32).read_local()


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the accumulated mean gradient."""
    return ParameterState(param, GRADIENT).read_local()


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of an optimizer state."""
    return ParameterState(param, optim_state_key).read_local()


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the master. The parameter follows, so that every rank must call."""
    ParameterState(param, FP32).write_local(value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the accumulated mean gradient."""
    ParameterState(param, GRADIENT).write_local(value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of an element-wise optimizer state."""
    ParameterState(param, optim_state_key).write_local(value)
