"""What scripts written for DeepSpeed read off its optimizer, under its names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from zero.deepspeed.fragments import safe_get_local_grad
from zero.deepspeed.leaf import get_z3_leaf_modules
from zero.optim.loss_scaler import LossScaler

if TYPE_CHECKING:
    from zero.comm import Communicator
    from zero.gradients import GradientReducer
    from zero.hooks import ModuleHooks


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
        raise AttributeError(f"{name} of the loss scaler follows the section fp16 of the configuration: set it there")


class OptimizerAttributes:
    """Mixed into `ZeroOptimizer`, which sets `fp16_groups`, `grad_norm`, `comm`, `reducer` and `scaler`.

    Attributes: parameter_offload: what gathers the parameters, with `forward_hooks` and `backward_hooks` that scripts
    take off for generation; set by the engine.
    """

    fp16_groups: list[list[nn.Parameter]]
    grad_norm: float | None
    comm: Communicator
    reducer: GradientReducer
    parameter_offload: ModuleHooks
    scaler: LossScaler | None

    @property
    def loss_scaler(self) -> LossScalerView:
        """The loss scaler; without fp16 a fixed one of scale 1."""
        return LossScalerView(self.scaler or LossScaler(loss_scale=1.0))

    loss_scale_config = loss_scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.dynamic

    @property
    def _global_grad_norm(self) -> float | None:
        return self.grad_norm

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
        """The parameters of each module that is gathered as a whole; see `zero.deepspeed.leaf`."""
        leaves = get_z3_leaf_modules(self.parameter_offload.module)
        return {leaf: list(leaf.parameters()) for leaf in leaves}

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """This rank's parts of the accumulated mean gradients, fp32, by param group; copies. Every rank must ask.

        Each is 1-D, in the layout of the parameter's `ds_tensor`. Empty without a gradient.
        """
        groups = [[safe_get_local_grad(param) for param in params] for params in self.fp16_groups]
        found = {index: [grad for grad in grads if grad is not None] for index, grads in enumerate(groups)}
        return {index: grads for index, grads in found.items() if grads}

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """`averaged_gradients`, by param group and number of the parameter in it."""
        return {index: dict(enumerate(grads)) for index, grads in self.averaged_gradients.items()}

    def _get_norm_groups(self) -> list[torch.Tensor]:
        """The 2-norm of each param group's accumulated mean gradient over all ranks. Every rank must call."""
        groups = self.averaged_gradients.values()
        squares = torch.stack([sum(grad.double().square().sum() for grad in grads) for grads in groups])
        if not self._replicated:
            self.comm.all_reduce(squares)
        return list(squares.sqrt().float())
