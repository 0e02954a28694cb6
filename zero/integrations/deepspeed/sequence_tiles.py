"""DeepSpeed's names for tiled computation (ALST). `zero.parallel.sequence.tiles` does the work.

DeepSpeed's are autograd functions, of which scripts call `apply`. `compute_params` has no effect:
the engine gets one gradient of each parameter anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero.errors import UsageError
from zero.parallel.sequence.tiles import tiled


class TiledMLP:
    """`fn(self, x)` for parts of x along its last dimension but one."""

    @staticmethod
    def apply(
        fn: Callable,
        self: torch.nn.Module,
        x: torch.Tensor,
        shards: int,
        compute_params: Any = None,
    ) -> torch.Tensor:
        return tiled(lambda part: fn(self, part), x, tiles=shards, dim=-2)


class TiledFusedLogitsLoss:
    """`fn(self, x, y)`, or `fn(self, x, y, mask)`, for parts of the tokens; the mean or the sum of
    the results.
    """

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: torch.nn.Module,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Any = None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        tensors = [
            tensor.reshape(-1, *tensor.shape[2:]) for tensor in (x, y, mask) if tensor is not None
        ]
        return _reduced(
            tiled(lambda *part: fn(self, *part)[None], *tensors, tiles=shards, dim=0),
            output_reduction,
        )


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: dict[str, torch.Tensor],
    kwargs_to_pass: dict[str, Any],
    grad_requiring_tensor_key: str | None = None,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """`fn(**kwargs)` for parts of `kwargs_to_shard` along dimension 1.

    The results are joined along `output_unshard_dimension`, where 0 stands for scalars, and
    reduced: "mean", "sum" or None. `seqlen` and `grad_requiring_tensor_key` have no effect: every
    tensor that needs a gradient gets one."""
    scalars = output_unshard_dimension == 0

    def part(*tensors: torch.Tensor) -> torch.Tensor:
        output = fn(**dict(zip(kwargs_to_shard, tensors, strict=True)), **kwargs_to_pass)
        return output[None] if scalars else output

    outputs = tiled(
        part, *kwargs_to_shard.values(), tiles=shards, dim=1, join=output_unshard_dimension
    )
    return outputs if output_reduction is None else _reduced(outputs, output_reduction)


def _reduced(outputs: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction not in ("mean", "sum"):
        raise UsageError(f"output_reduction: must be 'mean' or 'sum', got {reduction!r}")
    return outputs.mean() if reduction == "mean" else outputs.sum()
