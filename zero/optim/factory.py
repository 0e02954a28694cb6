"""The optimizer that the configuration names, or the user's own, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from zero.config import OptimizerConfig

# The update of an element must depend on nothing but its own history: shards cut across rows and matrices.
NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "Lamb", "LAMB", "Shampoo", "SOAP", "SparseAdam")


def build_optimizer(
    config: OptimizerConfig | None,
    given: torch.optim.Optimizer | Callable | None,
    model_parameters: Iterable | None,
    model: nn.Module,
    offloaded: bool,
) -> torch.optim.Optimizer | None:
    """The user's optimizer if there is one, else the configured one over `model_parameters`, else None.

    The configured one is torch's with torch's own choice of implementation, and so has the numbers of a plain loop;
    if its state is `offloaded` it is fused unless the configuration says otherwise: one pass over host memory
    takes a third of the time of several (benchmarks/LOG.md), and rounds differently in the last bit.

    Raises ValueError for an optimizer that is not element-wise.
    """
    if given is None and config is None:
        return None
    params = [p for p in model.parameters() if p.requires_grad] if model_parameters is None else list(model_parameters)
    if given is None:
        kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        settings = dict(config.params)
        if offloaded and not settings.get("foreach"):
            settings.setdefault("fused", True)
        return kind(params, **settings)
    optimizer = given if isinstance(given, torch.optim.Optimizer) else given(params)
    for kind in type(optimizer).__mro__:
        if kind.__name__ in NOT_ELEMENTWISE:
            raise ValueError(
                f"optimizer {kind.__name__} cannot be sharded: its update of an element depends on other elements of "
                "the same matrix, which other ranks hold; use an element-wise one such as AdamW"
            )
    return optimizer
