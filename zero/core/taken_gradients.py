"""Says that a script's work on gradients has no effect, because the engine takes them.

`torch.nn.utils.clip_grad_norm_` passes over parameters whose `.grad` is None, and loops of scripts
do so too. Therefore the first backward leaves a stand-in on one parameter, until the next backward
or step. Later steps cost nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import nn

from zero.core.sharded_param import local, needs_values

logger = logging.getLogger("zero")

# Scripts and `zero_grad` clear gradients, or move them with a module, which is no use of them.
_HARMLESS = frozenset(("detach_", "zero_", "to"))


class TakenGradient(torch.Tensor):
    """The stand-in: zeros, which warn at their first use."""

    is_told = False

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if not cls.is_told and needs_values(func) and func.__name__ not in _HARMLESS:
            cls.is_told = True
            logger.warning(
                "the script reads or changes `.grad` of parameters after backward, as "
                "torch.nn.utils.clip_grad_norm_ does. This has no effect, because the engine has "
                "taken the gradients: clip them by `gradient_clipping` in the configuration, and "
                "read them by zero.fragments.safe_get_full_grad"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def stand_in(params: Iterable[nn.Parameter]) -> nn.Parameter | None:
    """Put the stand-in on the smallest of `params`, and return that."""
    plain = [param for param in params if local(param) is param and param.requires_grad]
    smallest = min(plain, key=torch.Tensor.numel, default=None)
    if smallest is not None and not TakenGradient.is_told:
        smallest.grad = torch.zeros_like(smallest).as_subclass(TakenGradient)
    return smallest


def take_back(param: nn.Parameter) -> None:
    """Remove the stand-in, if it is still there."""
    if isinstance(param.grad, TakenGradient):
        param.grad = None
