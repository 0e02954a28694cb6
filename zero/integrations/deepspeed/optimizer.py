"""The engine's optimizer with the attributes that scripts written for DeepSpeed read.

No step is made here.
"""

from __future__ import annotations

import weakref
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn, cast

import torch
from torch import nn

from zero.core.hooks import ModuleHooks
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.fragments import safe_get_local_grad
from zero.optim.loss_scaler import LossScaler
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


class LossScaleNames:
    """The numbers of a loss scaler under DeepSpeed's names, as they are when they are read."""

    _NAMES = {
        **dict.fromkeys(("cur_scale", "loss_scale"), "scale"),
        **dict.fromkeys(("dynamic", "dynamic_loss_scale"), "dynamic"),
        "cur_iter": "steps",
        "last_overflow_iter": "last_overflow",
        "scale_window": "fp16.loss_scale_window",
        "min_loss_scale": "fp16.min_loss_scale",
    }

    def __init__(self, scaler: LossScaler | None):
        self._scaler = scaler

    def __getattr__(self, name: str) -> Any:
        if name not in self._NAMES:
            raise AttributeError(f"the loss scaler has no attribute {name!r}", name=name)
        own = self._NAMES[name]
        if self._scaler is None:  # not fp16
            return 1.0 if own == "scale" else 0
        return attrgetter(own)(self._scaler)


class DeepSpeedOptimizer(ZeroOptimizer):
    """`ZeroOptimizer` under DeepSpeed's name.

    Attributes:
        parameter_offload: a `ParameterOffload`, set by the engine.
        engine: whose optimizer this is, set by the engine.
    """

    parameter_offload: ParameterOffload
    engine: weakref.ref[ZeroEngine]

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """`ZeroEngine.offload_states`."""
        cast(ZeroEngine, self.engine()).offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """`ZeroEngine.reload_states`."""
        cast(ZeroEngine, self.engine()).reload_states(non_blocking)

    @property
    def cur_scale(self) -> float:
        """The present loss scale; 1 without fp16."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes during training."""
        return self.scaler is not None and self.scaler.dynamic

    @property
    def loss_scaler(self) -> LossScaleNames:
        """The loss scale as DeepSpeed's scripts log it."""
        return LossScaleNames(self.scaler)

    loss_scale_config = loss_scaler

    @property
    def _global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients."""
        return self.grad_norm

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's masters, in the order of groups."""
        return [shard.master for shard in self.shards.values()]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """This rank's part of each trained parameter's gradient, in fp32, under the key 0; empty
        while there are none."""
        params = [param for group in self.shards for param in group.params]
        parts = [safe_get_local_grad(param) for param in params]
        there = [part for part in parts if part is not None]
        return {0: there} if len(there) == len(parts) else {}

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """`averaged_gradients`, by the number of the parameter."""
        found = self.averaged_gradients
        return {key: dict(enumerate(parts)) for key, parts in found.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raises UsageError: the parameters of an engine are those of its optimizer."""
        raise UsageError(
            "add_param_group: the engine has sharded its optimizer's parameters. Give initialize "
            "all groups, also those that are trained later: a parameter whose requires_grad is "
            "False is left alone; or make a new engine with initialize"
        )
