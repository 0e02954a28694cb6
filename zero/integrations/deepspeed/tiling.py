"""DeepSpeed's `TiledLinear`: a linear layer in tiles that are gathered one after another.

It is for layers that are too large to be gathered as a whole. A tile is a module with the attribute
`zero.core.layout.TILE_FLAG`. This file knows nothing else of how groups are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from zero.core.gathered_parameters import GatheredParameters
from zero.core.layout import TILE_FLAG


class TiledLinear(nn.Module):
    """`nn.Linear` as `out_splits` x `in_splits` tiles, each a group of its own at stage 3.

    Args:
        in_features, out_features, bias: as for `nn.Linear`. in_splits, out_splits: tiles per input
        and output
            dimension; sizes differ by one at most.
        input_is_already_split: the input is a sequence of `in_splits` tensors, cut along the last
        dimension. combine_out_splits: False: the output is a list of `out_splits` tensors.
        linear_cls, **kwargs: the class of the tiles and its further arguments. init_linear: a
        linear layer to take the values from.

    Attributes: linears: the tile of an output and an input part is `linears[out][in]`; the last one
    of each output has its bias. in_parts, out_parts: where the parts begin, and the end.

    Raises RuntimeError unless the numbers of splits lie between 1 and the number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: object,
    ):
        super().__init__()
        self.in_parts = _cut(in_features, in_splits, "in")
        self.out_parts = _cut(out_features, out_splits, "out")
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.linears = nn.ModuleList()
        for low, high in pairwise(self.out_parts):
            row = nn.ModuleList()
            for first, end in pairwise(self.in_parts):
                tile = linear_cls(
                    end - first, high - low, bias=bias and end == in_features, **kwargs
                )
                setattr(tile, TILE_FLAG, True)
                row.append(tile)
            self.linears.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(
        self, x: torch.Tensor | Sequence[torch.Tensor]
    ) -> torch.Tensor | list[torch.Tensor]:
        """(..., in_features) to (..., out_features), either in parts if so asked for."""
        parts = (
            x
            if self.input_is_already_split
            else x.split([b - a for a, b in pairwise(self.in_parts)], dim=-1)
        )
        return self._combine(
            [
                self._sum(tile(part) for tile, part in zip(row, parts, strict=True))
                for row in self.linears
            ]
        )

    _sum = staticmethod(sum)

    def _combine(self, outputs: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take over the values of a linear layer of the same size; every rank must call it."""
        with GatheredParameters(other):
            for row, (low, high) in zip(self.linears, pairwise(self.out_parts), strict=True):
                for tile, (first, end) in zip(row, pairwise(self.in_parts), strict=True):
                    with GatheredParameters(tile, modifier_rank=0):
                        tile.weight.copy_(other.weight[low:high, first:end])
                        if tile.bias is not None:
                            tile.bias.copy_(other.bias[low:high])


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` of layers that return (output, bias or None) without adding the bias.

    It returns the same.
    """

    @staticmethod
    def _sum(
        outputs: list[tuple[torch.Tensor, torch.Tensor | None]],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts, biases = zip(*outputs, strict=True)
        return sum(parts), biases[-1]

    def _combine(self, outputs: list[tuple]) -> tuple:
        parts, biases = zip(*outputs, strict=True)
        return super()._combine(list(parts)), None if biases[0] is None else super()._combine(
            list(biases)
        )


def _cut(features: int, splits: int, side: str) -> list[int]:
    """Where `splits` parts of nearly equal size begin, and the end."""
    if not 1 <= splits <= features:
        raise RuntimeError(
            f"TiledLinear: {side}_splits must lie between 1 and {side}_features {features}: "
            f"{splits}"
        )
    size, longer = divmod(features, splits)
    return list(accumulate((size + (part < longer) for part in range(splits)), initial=0))
