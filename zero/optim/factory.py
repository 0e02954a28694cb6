"""The optimizer that the configuration names, or the user's own, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zero.config.optim import OptimizerConfig, why_not_sharded
from zero.errors import UsageError
from zero.optim.torch_optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLion


def build_optimizer(
    config: OptimizerConfig | None,
    given: torch.optim.Optimizer | Callable | None,
    model_parameters: Iterable | None,
    model: nn.Module,
    offloaded: bool,
    untested: bool = True,
) -> torch.optim.Optimizer | None:
    """The user's optimizer if there is one, else the configured one over `model_parameters`, else None.

    `given` may be a function of the parameters; `offloaded` tells whether the optimizer's state is in host memory,
    `untested` whether a class may be given that is neither torch's nor DeepSpeed's. Raises ValueError for such a one,
    and for an optimizer that is not element-wise: shards cut across rows and matrices, so the update of an element must
    depend on nothing but its own history.
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
    if not untested and not type(optimizer).__module__.startswith(("torch.optim.", "zero.optim.")):
        raise UsageError(
            f"optimizer {type(optimizer).__name__} is untested, and zero_allow_untested_optimizer is false: set it to "
            "true (if the update of an element depends on nothing but its own history), or take one of torch.optim"
        )
    if isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        optimizer.register_step_pre_hook(_make_adagrad_state)
    return optimizer


def _configured(config: OptimizerConfig, params: list, offloaded: bool) -> torch.optim.Optimizer:
    """The class that DeepSpeed would take, here with torch's numerics."""
    settings = dict(config.params)
    if config.type in ("Adam", "AdamW"):
        return _adam(config.type, params, settings, offloaded)
    classes = {"Adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad), "Lion": (FusedLion, DeepSpeedCPULion)}
    if config.type in classes:
        return classes[config.type][offloaded](params, **settings)
    return getattr(torch.optim, config.type)(params, **settings)


def _adam(name: str, params: list, settings: dict[str, Any], offloaded: bool) -> torch.optim.Adam:
    """torch's own class with `torch_adam`, else one with DeepSpeed's defaults: it decays no weights unless told to."""
    decoupled = settings.pop("adam_w_mode", True) or name == "AdamW"
    if settings.pop("torch_adam", False):
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **settings)
    if offloaded:
        return DeepSpeedCPUAdam(params, adamw_mode=decoupled, **settings)
    return FusedAdam(params, adam_w_mode=decoupled, **settings)


def _make_adagrad_state(optimizer: torch.optim.Adagrad, args: tuple, kwargs: dict) -> None:
    """Before a step, the state of parameters that have none: torch makes it on construction, of the parameters then."""
    for group in optimizer.param_groups:
        settings = {key: group[key] for key in ("initial_accumulator_value", "fused")}
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.state[param] = torch.optim.Adagrad([param], **settings).state[param]
