"""Muon for matrices and AdamW for the rest, in one optimizer: torch's own classes, each for its
param groups.

torch's Muon orthogonalizes one matrix after another. Here matrices of equal shape go through
Newton-Schulz together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zero.config.optim import optimizer_defaults
from zero.errors import UsageError
from zero.optim.elementwise import loss_of

# torch has it since 2.9. Without it, MuonWithAdamW refuses groups for Muon.
_Muon: Any = getattr(torch.optim, "Muon", torch.optim.Optimizer)
# What a group has that says nothing else; as in DeepSpeed and in Muon's first implementation.
_DEFAULTS = optimizer_defaults("Muon")
MUON_DEFAULTS: dict[str, Any] = {key: _DEFAULTS[key] for key in ("lr", "momentum", "weight_decay")}
ADAM_DEFAULTS: dict[str, Any] = {"lr": 3e-4} | {
    key: _DEFAULTS[key] for key in ("betas", "eps", "weight_decay")
}
# Matrices whose names contain one of these are no hidden layers, for which Muon is made.
NOT_HIDDEN = ("embed", "lm_head")
# Most elements of a batch of matrices. Small matrices gain by a batch; big ones would only take
# more memory.
BATCH = 1 << 22


class MuonWithAdamW(torch.optim.Optimizer):
    """Steps param groups whose `use_muon` is true by `torch.optim.Muon`, the others by Adam.

    Args:
        groups: dicts with `params`, `use_muon` and settings of Muon or AdamW.
        decoupled_weight_decay: whether AdamW, rather than Adam, updates the other parameters.

    Each parameter has the state of the class that updates it.

    Raises:
        UsageError: a group has no `use_muon`, or this torch has no Muon.
        ValueError: a parameter that should go to Muon is no matrix.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], decoupled_weight_decay: bool = True):
        self._decoupled = decoupled_weight_decay
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        super().__init__(groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the defaults of its class."""
        group = dict(param_group)
        if type(group.get("use_muon")) is not bool:
            raise UsageError(
                "MuonWithAdamW: a param group needs the entry 'use_muon', True or False"
            )
        if group["use_muon"] and _Muon is torch.optim.Optimizer:
            raise UsageError(
                f"optimizer Muon needs torch 2.9 or newer, and this is {torch.__version__}: pip "
                "install 'torch>=2.9', or take another optimizer"
            )
        if group["use_muon"]:
            part = BatchedMuon([group], **MUON_DEFAULTS)
        else:
            part = torch.optim.Adam(
                [group], **ADAM_DEFAULTS, decoupled_weight_decay=self._decoupled
            )
        self._parts.setdefault(group["use_muon"], part)
        super().add_param_group(part.param_groups[0])

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = loss_of(closure)
        for use_muon, part in self._parts.items():
            part.state = self.state
            part.param_groups = [
                group for group in self.param_groups if group["use_muon"] is use_muon
            ]
            part.step()
        return loss


class BatchedMuon(_Muon):
    """torch's Muon, with its settings, state and arithmetic, that multiplies matrices of equal
    shape together.
    """

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient.

        `MuonWithAdamW` has called the closure.
        """
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    alike[param.shape].append(param)
            for shape, params in alike.items():
                most = max(1, BATCH // max(1, shape.numel()))
                for first in range(0, len(params), most):
                    self._update(params[first : first + most], group)

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape."""
        lr, momentum, (rows, columns) = float(group["lr"]), group["momentum"], params[0].shape
        grads = [param.grad for param in params if param.grad is not None]
        for param, grad in zip(params, grads, strict=True):
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(grad)
        averages = [self.state[param]["momentum_buffer"] for param in params]
        torch._foreach_lerp_(averages, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, averages, momentum) if group["nesterov"] else averages
        matrices = torch.stack([update.bfloat16() for update in updates])
        matrices = orthogonalized(
            matrices, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        is_rms = group["adjust_lr_fn"] == "match_rms_adamw"
        ratio = 0.2 * math.sqrt(max(rows, columns)) if is_rms else math.sqrt(max(1, rows / columns))
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, matrices.unbind(), alpha=-lr * ratio)


def orthogonalized(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """About U @ V.T for each matrix U @ S @ V.T, by Newton-Schulz iterations in bf16, operation by
    operation as torch's Muon (`torch.optim._muon`).

    Args:
        matrices: bf16, (number, rows, columns).
    """
    a, b, c = coefficients
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def split_groups(
    groups: Iterable[Mapping[str, Any]],
    names: Mapping[nn.Parameter, str],
    muon: Mapping,
    adam: Mapping,
) -> Iterator[dict[str, Any]]:
    """Each group's hidden matrices as a group for Muon, and its other parameters as a group for
    Adam.

    Args:
        names: the names of the parameters.
        muon, adam: the settings of the two kinds of groups. A group's own settings take precedence.
    """
    for group in groups:
        for use_muon, settings, keys in ((True, muon, MUON_DEFAULTS), (False, adam, ADAM_DEFAULTS)):
            params = [
                p
                for p in group["params"]
                if p.requires_grad and is_hidden_matrix(p, names[p]) is use_muon
            ]
            if params:
                own = {key: value for key, value in group.items() if key in keys}
                yield {"params": params, "use_muon": use_muon, **settings, **own}


def is_hidden_matrix(param: nn.Parameter, name: str) -> bool:
    """Whether Muon is made for it: two dimensions, and neither an embedding nor the head."""
    return param.dim() == 2 and not any(word in name.lower() for word in NOT_HIDDEN)
