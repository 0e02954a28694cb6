"""LAMB, for `"type": "Lamb"`. With a ratio that is always 1 it is Adam, which can then leave the
bias uncorrected. It updates whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zero.optim.elementwise import loss_of


class Lamb(torch.optim.Optimizer):
    """LAMB (arXiv 1904.00962) with DeepSpeed's arguments: Adam's update of a tensor, times the
    ratio of the norms of the tensor and of the update, between `min_coeff` and `max_coeff`.

        update = exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay * param
        param -= lr * correction * ratio * update

    The ratio is 1 if one of the norms is 0. `correction` corrects the bias of the moments, and is 1
    without `bias_correction`. With `adam_w_mode=False`, weight decay is added to the gradient
    instead.

    State: `step`; `exp_avg` and `exp_avg_sq`, of the parameter's shape and dtype.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        adam_w_mode: bool = True,
    ):
        settings = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        settings |= {"weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, settings | {"adam_w_mode": adam_w_mode})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[param], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        if not group["adam_w_mode"]:
            grad = grad.add(param, alpha=group["weight_decay"])
        mean = state["exp_avg"].lerp_(grad, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        update = mean / square.sqrt().add_(group["eps"])
        if group["adam_w_mode"]:
            update.add_(param, alpha=group["weight_decay"])
        ratio = param.norm() / update.norm()
        ratio = ratio.clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((param.norm() > 0) & (update.norm() > 0), ratio, 1.0)
        step, rate = float(state["step"]), group["lr"]
        if group["bias_correction"]:
            rate = rate * (1 - second**step) ** 0.5 / (1 - first**step)
        param.sub_(update * ratio * rate)
