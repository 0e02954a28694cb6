"""The engine's optimizer with the attributes that scripts written for DeepSpeed read.

No step is made here.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torch import nn

from zero.core.hooks import ModuleHooks
from zero.errors import UsageError
from zero.optim.sharded_optimizer import ZeroOptimizer


class ParameterOffload:
    """The engine's hooks under DeepSpeed's names, for TRL, which takes them off while a model
    generates.

    It gathers all parameters, removes the handles in `forward_hooks` and `backward_hooks`, sets
    both to empty lists, and calls `_register_deepspeed_module(module)` afterwards. It also reads
    the model's `ds_external_parameters` and clears the parameters' `ds_active_sub_modules`. These
    two stay empty: the engine notices every read."""

    def __init__(self, hooks: ModuleHooks):
        self._hooks = hooks
        self.module = hooks.module
        self.forward_hooks = hooks.forward_hooks
        self.backward_hooks = hooks.backward_hooks
        vars(self.module)["ds_external_parameters"] = partial(iter, ())
        for param in self.module.parameters():
            vars(param)["ds_active_sub_modules"] = set()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Put the hooks on again."""
        # the script has replaced this object's lists, not those of `ModuleHooks`
        self._hooks.remove()
        self._hooks.install()
        self.forward_hooks = self._hooks.forward_hooks
        self.backward_hooks = self._hooks.backward_hooks


class DeepSpeedOptimizer(ZeroOptimizer):
    """`ZeroOptimizer` under DeepSpeed's name.

    Attributes:
        parameter_offload: a `ParameterOffload`, set by the engine.
        ranks_summed: the number of ranks with parts of the same samples, whose gradients are added.
    """

    parameter_offload: ParameterOffload
    ranks_summed = 1

    @property
    def gradient_factor(self) -> float:
        """What a stored gradient must be multiplied by: see `ZeroOptimizer.gradient_factor`."""
        return super().gradient_factor * self.ranks_summed

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raises UsageError: the parameters of an engine are those of its optimizer."""
        raise UsageError(
            "add_param_group: the engine has sharded its optimizer's parameters. Give initialize "
            "all groups, also those that are trained later: a parameter whose requires_grad is "
            "False is left alone; or make a new engine with initialize"
        )
