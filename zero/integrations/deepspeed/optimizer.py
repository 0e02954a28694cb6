"""The engine's optimizer with the attributes that scripts written for DeepSpeed read.

No step is made here.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter

import torch
from torch import nn

from zero.core.hooks import ModuleHooks
from zero.integrations.deepspeed.fragments import safe_get_local_grad
from zero.integrations.deepspeed.leaf import get_z3_leaf_modules
from zero.optim.loss_scaler import LossScaler
from zero.optim.sharded_optimizer import ZeroOptimizer


class LossScalerView:
    """A loss scaler under DeepSpeed's names; to be read only."""

    __slots__ = ("_scaler",)
    _NAMES = {
        "cur_scale": "scale",
        "loss_scale": "scale",
        "dynamic_loss_scale": "dynamic",
        "scale_window": "loss_scale_window",
        "min_scale": "min_loss_scale",
        "delayed_shift": "hysteresis",
        "cur_hysteresis": "_overflows_left",
        "cur_iter": "_steps",
        "last_overflow_iter": "_last_overflow",
    }

    def __init__(self, scaler: LossScaler):
        object.__setattr__(self, "_scaler", scaler)

    def __getattr__(self, name: str) -> object:
        return getattr(self._scaler, self._NAMES.get(name, name))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{name} of the loss scaler follows the section fp16 of the configuration: set it there"
        )


class ParameterOffload:
    """The engine's hooks under DeepSpeed's names, for scripts that take them off while a model
    generates.

    Such a script gathers all parameters, removes the handles in `forward_hooks` and
    `backward_hooks`, sets both to empty lists, and calls `_register_deepspeed_module(module)`
    afterwards. It also reads the model's `ds_external_parameters` and clears the parameters'
    `ds_active_sub_modules`. These two stay empty: the engine notices every read."""

    def __init__(self, hooks: ModuleHooks):
        self._hooks = hooks
        self.module = hooks.module
        self.forward_hooks = hooks.forward_hooks
        self.backward_hooks = hooks.backward_hooks
        self.module.ds_external_parameters = partial(iter, ())
        for param in self.module.parameters():
            param.ds_active_sub_modules = set()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Put the hooks on again."""
        # the script has replaced this object's lists, not those of `ModuleHooks`
        self._hooks.remove()
        self._hooks.install()
        self.forward_hooks = self._hooks.forward_hooks
        self.backward_hooks = self._hooks.backward_hooks


class DeepSpeedOptimizer(ZeroOptimizer):
    """`ZeroOptimizer` with DeepSpeed's names.

    Attributes: parameter_offload: a `ParameterOffload`, set by the engine.
    """

    parameter_offload: ParameterOffload

    fp16_groups = property(
        attrgetter("model_params"), doc="The model's parameters, by param group."
    )
    cur_scale = property(
        attrgetter("loss_scale"), doc="The present factor on the loss; 1 without fp16."
    )
    dynamic_loss_scale = property(
        attrgetter("loss_scaler.dynamic"), doc="Whether the factor changes."
    )
    _global_grad_norm = property(
        attrgetter("grad_norm"), doc="The norm of the last step's gradient, or None."
    )

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's part of the masters, each 1-D: tile by tile, or of an optimizer of whole
        tensors one by one.
        """
        self.wait()
        if self.whole is not None:
            return [tensor.part(tensor.shard.master) for tensor in self.whole.tensors]
        return [tile.master for tile in self.tiles]

    def needs_scaler(self) -> bool:
        """Whether the loss must be scaled before `backward()`; see `ZeroEngine.scale`."""
        return self.scaler is not None

    @property
    def loss_scaler(self) -> LossScalerView:
        """The loss scaler; without fp16 a fixed one of scale 1."""
        return LossScalerView(self.scaler or LossScaler(loss_scale=1.0))

    loss_scale_config = loss_scaler

    @property
    def micro_step_id(self) -> int:
        """The number of the last micro-batch since the step, from 0."""
        return max(0, self.reducer.backwards - 1)

    @property
    def _epilogue_ran_this_backward(self) -> bool:
        """Whether there has been a backward since the step."""
        return self.reducer.backwards > 0

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The parameters of each leaf module; see `zero.integrations.deepspeed.leaf`."""
        leaves = get_z3_leaf_modules(self.parameter_offload.module)
        return {leaf: list(leaf.parameters()) for leaf in leaves}

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """This rank's parts of the accumulated mean gradients, fp32 copies, by param group. Every
        rank must ask.

        Each is 1-D, in the layout of the parameter's `ds_tensor`. A parameter without a gradient is
        left out."""
        groups = [[safe_get_local_grad(param) for param in params] for params in self.fp16_groups]
        found = {
            index: [grad for grad in grads if grad is not None]
            for index, grads in enumerate(groups)
        }
        return {index: grads for index, grads in found.items() if grads}

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """`averaged_gradients`, by param group and number of the parameter in it."""
        return {index: dict(enumerate(grads)) for index, grads in self.averaged_gradients.items()}

    def _get_norm_groups(self) -> list[torch.Tensor]:
        """The 2-norm of each param group's accumulated mean gradient over all ranks.

        Every rank must call.
        """
        groups = self.averaged_gradients.values()
        squares = torch.stack(
            [sum(grad.double().square().sum() for grad in grads) for grads in groups]
        )
        if not self._replicated:
            self.comm.all_reduce(squares)
        return list(squares.sqrt().float())
