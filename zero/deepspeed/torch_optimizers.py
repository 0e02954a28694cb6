"""The optimizer that the configuration names, or the user's own, checked; and DeepSpeed's classes.

These have their call signatures, with the numerics of torch, and Lion, which torch lacks. accelerate puts them in the
place of a user's optimizer when it is offloaded to the CPU, and scripts written for DeepSpeed make them themselves. The
engine drives them over 1-D pieces of the fp32 masters, as any other optimizer.

Arguments that are common to all: `params` (`model_params`), parameters or param groups, where what a group says for
itself goes before the other arguments; `lr`, `eps`, `weight_decay`, `betas` as in torch; `fp32_optimizer_states`, True
alone (ValueError); `set_grad_none`, without effect, as gradients are always freed; `**settings`, further ones of the
torch class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zero.config.optim import OptimizerConfig, why_not_sharded
from zero.errors import UsageError

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def _refuse_false(optimizer: torch.optim.Optimizer, **flags: bool) -> None:
    for name, value in flags.items():
        if not value:
            raise ValueError(f"{type(optimizer).__name__}: {name}=False is not supported; leave it at True")


class FusedAdam(torch.optim.Adam):
    """Adam (arXiv 1412.6980) with an L2 term in the gradient, or with `adam_w_mode` AdamW (arXiv 1711.05101).

    Raises ValueError for `bias_correction=False`.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **settings: Any,
    ):
        _refuse_false(self, bias_correction=bias_correction)
        self.adam_w_mode = adam_w_mode
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adam_w_mode, **settings)


class DeepSpeedCPUAdam(FusedAdam):
    """As `FusedAdam`; the argument is called `adamw_mode` here."""

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        **settings: Any,
    ):
        _refuse_false(self, fp32_optimizer_states=fp32_optimizer_states)
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad, **settings)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad. Raises ValueError for `amsgrad=True`, which has no meaning here."""

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        **settings: Any,
    ):
        _refuse_false(self, fp32_optimizer_states=fp32_optimizer_states)
        if amsgrad:
            raise ValueError("DeepSpeedCPUAdagrad: amsgrad is a variant of Adam; leave it at False")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay, **settings)


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum, decoupled weight decay.

        update = sign(betas[0] * exp_avg + (1 - betas[0]) * grad)
        param -= lr * (update + weight_decay * param)
        exp_avg = betas[1] * exp_avg + (1 - betas[1]) * grad

    The sign of 0 is 0. State: `exp_avg`, of the parameter's shape and dtype. Defaults are DeepSpeed's.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = True,
    ):
        _refuse_false(self, fp32_optimizer_states=fp32_optimizer_states)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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


class FusedLion(Lion):
    """Lion."""


class DeepSpeedCPULion(Lion):
    """Lion."""


def build_optimizer(
    config: OptimizerConfig | None,
    given: torch.optim.Optimizer | Callable | None,
    model_parameters: Iterable | None,
    model: nn.Module,
    offloaded: bool,
    untested: bool = True,
    force_cpu_optimizer: bool = False,
) -> torch.optim.Optimizer | None:
    """The user's optimizer if there is one, else the configured one over `model_parameters`, else None.

    `given` may be a function of the parameters; `offloaded` tells whether the optimizer's state is in host memory,
    `untested` whether a class may be given that is neither torch's nor DeepSpeed's, `force_cpu_optimizer` whether one
    that is offloaded must be DeepSpeed's. Raises ValueError for such a one, and for an optimizer that is not
    element-wise: shards cut across rows and matrices, so the update of an element must depend on nothing but its own
    history.
    """
    if given is None and config is None:
        return None
    params = [p for p in model.parameters() if p.requires_grad] if model_parameters is None else list(model_parameters)
    if given is None:
        optimizer = _configured(config, params, offloaded)
    else:
        optimizer = given if isinstance(given, torch.optim.Optimizer) else given(params)
    for kind in type(optimizer).__mro__:
        if refusal := why_not_sharded(kind.__name__):
            raise ValueError(f"optimizer {refusal}")
    if not untested and not type(optimizer).__module__.startswith(("torch.optim.", "zero.deepspeed.")):
        raise UsageError(
            f"optimizer {type(optimizer).__name__} is untested, and zero_allow_untested_optimizer is false: set it to "
            "true (if the update of an element depends on nothing but its own history), or take one of torch.optim"
        )
    ours = isinstance(optimizer, DeepSpeedCPUAdam | DeepSpeedCPUAdagrad | DeepSpeedCPULion)
    if given is not None and offloaded and force_cpu_optimizer and not ours:
        raise UsageError(
            f"optimizer {type(optimizer).__name__} is offloaded, and zero_force_ds_cpu_optimizer is true: take "
            "deepspeed.ops.adam.DeepSpeedCPUAdam or the like, or leave the key out"
        )
    if isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        optimizer.register_step_pre_hook(_make_adagrad_state)
    return optimizer


def _configured(config: OptimizerConfig, params: list, offloaded: bool) -> torch.optim.Optimizer:
    """The class that DeepSpeed would take, here with torch's numerics.

    Adam is torch's own with `torch_adam`, else one with DeepSpeed's defaults: it decays no weights unless told to.
    """
    kind, settings = config.type, dict(config.params)
    if kind in ("Adam", "AdamW"):
        decoupled = settings.pop("adam_w_mode", True) or kind == "AdamW"
        if settings.pop("torch_adam", False):
            return (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **settings)
        if offloaded:
            return DeepSpeedCPUAdam(params, adamw_mode=decoupled, **settings)
        return FusedAdam(params, adam_w_mode=decoupled, **settings)
    classes = {"Adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad), "Lion": (FusedLion, DeepSpeedCPULion)}
    make = classes[kind][offloaded] if kind in classes else getattr(torch.optim, kind)
    return make(params, **settings)


def _make_adagrad_state(optimizer: torch.optim.Adagrad, args: tuple, kwargs: dict) -> None:
    """Before a step, the state of parameters that have none: torch makes it on construction, of the parameters then."""
    for group in optimizer.param_groups:
        # As in torch, the sum begins at the optimizer's value, whatever the group says.
        begin = optimizer.defaults["initial_accumulator_value"]
        settings = {"initial_accumulator_value": begin, "fused": group["fused"]}
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.state[param] = torch.optim.Adagrad([param], **settings).state[param]
