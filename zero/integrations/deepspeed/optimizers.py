"""DeepSpeed's optimizer classes, with torch's numerics, and the optimizer that the section
`optimizer` asks for.

accelerate substitutes these classes for a user's optimizer that is offloaded to the CPU. Scripts
that were written for DeepSpeed create them too. The engine treats them like any other torch
optimizer; this file knows nothing about the engine.

Arguments common to all: `params` (`model_params`), parameters or param groups; then those in
`arguments`, by position or by name; by name also more arguments of the torch class. `lr`, `eps`,
`weight_decay`, `betas` are as in torch, and `weight_decay` of Adam is 0 by default. `set_grad_none`
has no effect, as gradients are always freed. `fp32_optimizer_states` and `bias_correction` must
be True (ValueError). On a GPU Adam is torch's fused one, unless `fused` or `foreach` is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zero.comm.world import compute_device, get_world_size
from zero.config import Config
from zero.config.optim import TYPES, OptimizerConfig, optimizer_defaults, why_refused
from zero.errors import UsageError
from zero.optim import adam_cpu
from zero.optim.elementwise import Lion, make_state_late, require_possible
from zero.optim.lamb import Lamb
from zero.optim.muon import MuonWithAdamW, split_groups

# Where torch has a fused Adam that is the fastest one. On a CPU, `adam_cpu` takes its place.
_FUSING = ("cuda", "xpu", "hpu")

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def _by_name(optimizer: Any, args: tuple, settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of one of DeepSpeed's classes by their names, without those that torch's class
    has no use for.

    Raises TypeError for too many, ValueError for a flag that must be true.
    """
    kind, names = type(optimizer).__name__, optimizer.arguments
    if len(args) > len(names) or settings.keys() & names[: len(args)]:
        raise TypeError(f"{kind}: its arguments are the parameters, {', '.join(names)}")
    settings = settings | dict(zip(names, args, strict=False))
    for flag in ("bias_correction", "fp32_optimizer_states"):
        if not settings.pop(flag, True):
            raise ValueError(f"{kind}: {flag}=False is not supported; leave it at True")
    settings.pop("set_grad_none", None)
    return settings


# Settings in the param groups of optimizers that are not Adam.
_NOT_ADAMS = set().union(
    *map(optimizer_defaults, TYPES),
    ("clip_threshold", "beta2_decay", "ns_steps", "d0", "weight_lr_power"),
)
_NOT_ADAMS -= {*optimizer_defaults("Adam"), *optimizer_defaults("AdamW"), "decoupled_weight_decay"}


def _refuse_groups_of_another(params: Params) -> None:
    """Raise UsageError for param groups of another optimizer: accelerate makes Adam of whatever is
    offloaded.
    """
    for group in params if isinstance(params, list) else ():
        if not isinstance(group, dict):
            continue
        other = sorted(_NOT_ADAMS & group.keys())
        if other or ("maximize" in group and "amsgrad" not in group):
            raise UsageError(
                "DeepSpeedCPUAdam got the param groups of another optimizer "
                f"({', '.join(other) or 'no amsgrad'}): accelerate puts Adam in place of an "
                "optimizer that is offloaded. To keep yours, set zero_force_ds_cpu_optimizer to "
                "false in the configuration"
            )


@adam_cpu.computes_as_torch_adam
class FusedAdam(torch.optim.Adam):
    """Adam (arXiv 1412.6980) with an L2 term in the gradient, or with `adam_w_mode` AdamW (arXiv
    1711.05101).
    """

    arguments = (
        "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none".split()
    )

    def __init__(self, params: Params, *args: Any, **settings: Any):
        settings = {"weight_decay": 0.0} | _by_name(self, args, settings)
        chosen = settings.keys() & {"fused", "foreach", "differentiable"}
        if not chosen and compute_device().type in _FUSING:
            settings["fused"] = True
        self.adam_w_mode = settings.pop("adam_w_mode", True)
        super().__init__(params, decoupled_weight_decay=self.adam_w_mode, **settings)


@adam_cpu.computes_as_torch_adam
class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` with another order of arguments, and `adam_w_mode` under another name."""

    arguments = (
        "lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states".split()
    )

    def __init__(self, model_params: Params, *args: Any, **settings: Any):
        _refuse_groups_of_another(model_params)
        settings = _by_name(self, args, settings)
        settings["adam_w_mode"] = settings.pop("adamw_mode", True)
        super().__init__(model_params, **settings)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad. Raises ValueError for `amsgrad=True`, which has no meaning here."""

    arguments = "lr eps weight_decay amsgrad fp32_optimizer_states".split()

    def __init__(self, model_params: Params, *args: Any, **settings: Any):
        settings = _by_name(self, args, settings)
        if settings.pop("amsgrad", False):
            raise ValueError("DeepSpeedCPUAdagrad: amsgrad is a variant of Adam; leave it at False")
        super().__init__(model_params, **settings)


class FusedLion(Lion):
    """`Lion` with DeepSpeed's arguments."""

    arguments = "lr betas weight_decay set_grad_none fp32_optimizer_states".split()

    def __init__(self, params: Params, *args: Any, **settings: Any):
        super().__init__(params, **_by_name(self, args, settings))


class DeepSpeedCPULion(FusedLion):
    """The one for an optimizer that is offloaded: `zero_force_ds_cpu_optimizer` asks for it."""


def build_optimizer(
    settings: Config,
    given: torch.optim.Optimizer | Callable | None,
    model_parameters: Iterable | None,
    model: nn.Module,
) -> torch.optim.Optimizer | None:
    """The user's optimizer if there is one, else the configured one over `model_parameters`, else
    None.

    `given` is an optimizer, or a function of the parameters that makes one. Raises ValueError for
    an optimizer that the configuration rules out, and for one that cannot work on so many ranks.
    """
    zero = settings.zero_optimization
    if model_parameters is None:
        params = [param for param in model.parameters() if param.requires_grad]
    else:
        params = list(model_parameters)
    if isinstance(given, torch.optim.Optimizer):
        optimizer = given
    elif callable(given):
        optimizer = given(params)
    elif given is not None:
        kind = type(given).__name__
        refused = why_refused(kind, get_world_size())
        raise UsageError(
            f"optimizer {refused or f'of class {kind} is not a torch.optim.Optimizer'}"
        )
    elif settings.optimizer is not None:
        optimizer = _configured(settings.optimizer, params, zero.offloads_optimizer, model)
    else:
        return None
    require_possible(optimizer, get_world_size())
    kind = type(optimizer)
    known = kind.__module__.startswith(("torch.optim.", "zero."))
    if not known and zero.stage > 0 and not settings.zero_allow_untested_optimizer:
        raise UsageError(
            f"optimizer {kind.__name__} is untested, and zero_allow_untested_optimizer is false: "
            "set it to true, or use one of torch.optim"
        )
    ours = issubclass(kind, DeepSpeedCPUAdam | DeepSpeedCPUAdagrad | DeepSpeedCPULion)
    given_key = "zero_force_ds_cpu_optimizer" in settings.origin.given
    forced = settings.zero_force_ds_cpu_optimizer and given_key
    if given is not None and zero.offloads_optimizer and forced and not ours:
        raise UsageError(
            f"optimizer {kind.__name__} is offloaded, and zero_force_ds_cpu_optimizer is true: "
            "use deepspeed.ops.adam.DeepSpeedCPUAdam or similar, or leave the key out"
        )
    make_state_late(optimizer)
    return optimizer


def _configured(
    config: OptimizerConfig, params: list, offloaded: bool, model: nn.Module
) -> torch.optim.Optimizer:
    """The class that DeepSpeed would take, here with torch's numerics.

    Adam is torch's own with `torch_adam`, otherwise one with DeepSpeed's defaults, which decays
    weights only if `weight_decay` is set."""
    kind, settings = config.type, dict(config.params)
    if kind == "Muon":
        return _muon(settings, params, model)
    if kind not in ("Adam", "AdamW"):
        plain = {"Lamb": Lamb, "Lion": FusedLion}.get(kind) or getattr(torch.optim, kind)
        on_host = {"Adagrad": DeepSpeedCPUAdagrad, "Lion": DeepSpeedCPULion}.get(kind, plain)
        return (on_host if offloaded else plain)(params, **settings)
    decoupled = settings.pop("adam_w_mode", True) or kind == "AdamW"
    if not settings.pop("bias_correction", True):
        return _uncorrected_adam(params, settings, decoupled)
    if settings.pop("torch_adam", False):
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **settings)
    if offloaded:
        return DeepSpeedCPUAdam(params, adamw_mode=decoupled, **settings)
    return FusedAdam(params, adam_w_mode=decoupled, **settings)


def _uncorrected_adam(params: list, settings: dict[str, Any], decoupled: bool) -> Lamb:
    """Adam without correction of the bias: `Lamb` whose ratio is always 1."""
    for name in ("torch_adam", "amsgrad", "maximize", "foreach", "fused"):
        if settings.pop(name, False):
            raise UsageError(
                f"optimizer.params.{name}: not available where bias_correction is false; delete it"
            )
    settings |= {"bias_correction": False, "min_coeff": 1.0, "max_coeff": 1.0}
    return Lamb(params, adam_w_mode=decoupled, **settings)


def _muon(settings: dict[str, Any], params: list, model: nn.Module) -> MuonWithAdamW:
    """Muon for the hidden matrices of each group, AdamW for the rest.

    `muon_lr` and `adam_lr` override `lr`.
    """

    def half(rate: str, *keys: str) -> dict[str, Any]:
        own = {key: settings[key] for key in ("lr", "weight_decay", *keys) if key in settings}
        return own | ({"lr": settings[rate]} if rate in settings else {})

    loose = [param for param in params if isinstance(param, torch.Tensor)]
    groups = [group for group in params if isinstance(group, dict)]
    if loose:
        groups.append({"params": loose})
    names = {param: name for name, param in model.named_parameters()}
    if strangers := [param for group in groups for param in group["params"] if param not in names]:
        raise UsageError(
            f"optimizer Muon: {len(strangers)} of model_parameters are not the model's, the first "
            f"one of shape {tuple(strangers[0].shape)}"
        )
    halves = half("muon_lr", "momentum"), half("adam_lr", "betas", "eps")
    return MuonWithAdamW(split_groups(groups, names, *halves), settings.get("adam_w_mode", True))
