"""Warns a script that its work on gradients has no effect, because the engine takes them over.

`torch.nn.utils.clip_grad_norm_` skips parameters whose `.grad` is None, and so do loops in scripts.
Therefore the first backward, and the last ones of steps 1, 2, 4, 8, ..., leave a stand-in on each
parameter, until the next backward or step. It takes the memory of one element. Other steps cost
nothing."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.core.sharded_param import local, needs_values, written_by

logger = logging.getLogger("zero")

# Scripts and `zero_grad` clear gradients, or move them with a module, which does not use them.
_HARMLESS = frozenset(("detach_", "zero_", "_foreach_zero_", "to"))


class TakenGradient(torch.Tensor):
    """The stand-in: one zero in the shape of the parameter, which warns at its first use, and does
    not change.
    """

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
                "taken the gradients: clip them with `gradient_clipping` in the configuration, and "
                "read them with zero.fragments.safe_get_full_grad"
            )
        kwargs = kwargs or {}
        if any(isinstance(tensor, cls) for tensor in written_by(func, args, kwargs)):
            return args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            is_view = isinstance(result, torch.Tensor) and not any(result.stride())
            return result.as_subclass(cls) if is_view and result.numel() > 1 else result


class StandIns:
    """The stand-ins of one model's parameters, while there are any.

    Attributes:
        backwards: how many have ended.
    """

    def __init__(self) -> None:
        self._left: list[tuple[nn.Parameter, RemovableHandle]] = []
        self.backwards = self._last_ones = 0
        self._is_watched = False

    def end_backward(self, is_last: bool) -> None:
        """A backward has ended. `is_last`: it was the last one of its step, where scripts work on
        gradients, though perhaps not from the first step on.
        """
        self.backwards += 1
        self._last_ones += is_last
        is_sampled = is_last and self._last_ones & (self._last_ones - 1) == 0
        self._is_watched = self.backwards == 1 or is_sampled

    def leave(self, params: Iterable[nn.Parameter]) -> None:
        """Leave one on each of `params`, if the last backward is one of those to watch."""
        for param in params if self._is_watched and not TakenGradient.is_told else ():
            with torch._C.DisableTorchFunctionSubclass():  # sharded parameters look at each access
                if local(param) is not param or not param.requires_grad:
                    continue
                dtype = getattr(param, "grad_dtype", param.dtype)
                zero = torch.zeros((), dtype=dtype, device=param.device)
                param.grad = zero.expand(param.shape).as_subclass(TakenGradient)
                # Autograd cannot add a gradient to a stand-in.
                handle = param.register_hook(partial(_take_back, weakref.proxy(param)))
                self._left.append((param, handle))

    def take_back(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            while self._left:
                param, handle = self._left.pop()
                handle.remove()
                _take_back(param)


def _take_back(param: nn.Parameter, gradient: torch.Tensor | None = None) -> None:
    if isinstance(param.grad, TakenGradient):
        param.grad = None
