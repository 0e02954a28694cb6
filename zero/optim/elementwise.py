"""Knows which optimizers are element-wise, so that their state can be sharded like the weights.
Also has what Adagrad needs for that, and Lion.

Shards cut rows and matrices at any element. So the update of an element may depend only on that
element's history. All other optimizers get whole tensors (`zero.optim.whole_tensor`), which is
right for classes that look at one tensor at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zero.config.optim import ELEMENTWISE, why_refused
from zero.errors import UsageError


def require_possible(optimizer: torch.optim.Optimizer, world_size: int) -> None:
    """Raise UsageError, with the reason, for an optimizer that is known not to work on so many
    ranks.
    """
    for kind in type(optimizer).__mro__:
        if refusal := why_refused(kind.__name__, world_size):
            raise UsageError(f"optimizer {refusal}")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class whose `step` the optimizer runs is known to be element-wise."""
    # torch puts a wrapper of an inherited step on the class that is made first.
    step = inspect.unwrap(type(optimizer).step)
    home, name = step.__module__, step.__qualname__.removesuffix(".step")
    return name in ELEMENTWISE and (home == Lion.__module__ or home.startswith("torch.optim."))


def make_state_late(optimizer: torch.optim.Optimizer) -> None:
    """Make Adagrad create its state at the first step, as other optimizers do.

    torch creates it on construction, for parameters that the sub-groups replace.
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        optimizer.register_step_pre_hook(_make_adagrad_state)


def _make_adagrad_state(optimizer: torch.optim.Adagrad, args: tuple, kwargs: dict) -> None:
    for group in optimizer.param_groups:
        # As in torch, the sum begins at the optimizer's value. The group's value is ignored.
        begin = optimizer.defaults["initial_accumulator_value"]
        settings = {"initial_accumulator_value": begin, "fused": group["fused"]}
        for param in group["params"]:
            if param.grad is not None and not optimizer.state[param]:
                optimizer.state[param] = torch.optim.Adagrad([param], **settings).state[param]


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure that an optimizer's `step` was given returns; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum, decoupled weight
    decay.

        update = sign(betas[0] * exp_avg + (1 - betas[0]) * grad)
        param -= lr * (update + weight_decay * param)
        exp_avg = betas[1] * exp_avg + (1 - betas[1]) * grad

    The sign of 0 is 0. State: `exp_avg`, of the parameter's shape and dtype.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            fast, slow = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                update = state["exp_avg"].lerp(param.grad, 1 - fast).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.mul_(group["lr"]))
                state["exp_avg"].lerp_(param.grad, 1 - slow)
        return loss
