"""Floating-point operations of single calls, by torch's formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
# Torch's formulas, and those that it lacks: fused attention on CPUs, where a causal mask saves
# nothing, and experts.
_FORMULAS = flop_registry | {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: (
        4 * q.numel() * k.shape[-2]
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, *_, **__: (
        10 * q.numel() * k.shape[-2]
    ),
    _aten._grouped_mm: lambda a, b, *_, **__: 2 * a.numel() * b.shape[-1],
}


def operations(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Floating-point operations of one call: matrix products count, all others are 0."""
    formula = _FORMULAS.get(getattr(func, "overloadpacket", func))
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)
