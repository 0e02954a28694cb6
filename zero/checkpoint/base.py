"""The quantized base of a model, which is not written into checkpoints: what identifies it, so that
training does not go on upon another one.

Each layer's bytes are summed, each times its position, by each rank over its shards. The sums do
not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zero.core.param_group import ParamGroup
from zero.core.quantized_weights import keeps_codes_in_buffers, quantized_tensors
from zero.core.sharded_param import owning_group
from zero.errors import UsageError

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

# By layer: its bytes, and their sum.
Sums = Mapping[str, Sequence[int]]

# So many bytes are summed at a time: as 64-bit integers they take eight times the memory.
CHUNK = 1 << 20
# Sums are kept modulo this number, because those of 64-bit integers wrap around.
MODULUS = 1 << 53

# For each group: the version of its values, and the sum of each parameter's bytes in the shard.
_sums: WeakKeyDictionary[ParamGroup, tuple[int, list[int]]] = WeakKeyDictionary()


def base_layers(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """The tensors of each quantized layer, by the layer's name."""
    buffers = None if keeps_codes_in_buffers(model) else False
    layers = {
        name: [each.tensor for each in quantized_tensors(module, buffers)]
        for name, module in model.named_modules()
    }
    return {name: tensors for name, tensors in layers.items() if tensors}


def sums_of_rank(engine: ZeroEngine) -> Sums:
    """This rank's part of the sums: of its shards, and on rank 0 of what is not sharded.

    Nothing if the model is split over a model group."""
    found: dict[str, tuple[int, int]] = {}
    if engine.comm.model is not None:
        return found
    for name, tensors in base_layers(engine.module).items():
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        found[name] = nbytes, sum(_sum_of_rank(engine, tensor) for tensor in tensors)
    return found


def total(of_ranks: Sequence[Sums]) -> Sums:
    """The sums over all ranks."""
    return {
        name: (nbytes, sum(sums[name][1] for sums in of_ranks) % MODULUS)
        for name, (nbytes, _) in of_ranks[0].items()
    }


def require_same_base(stored: Sums, here: Sums) -> None:
    """Raise UsageError, which names a layer, if the model has another base than the checkpoint."""
    for name in sorted(stored.keys() | here.keys()):
        if list(stored.get(name, ())) != list(here.get(name, ())):
            raise UsageError(
                f"the quantized layer {name!r} of the model is not the one that the checkpoint was "
                "trained with: load the same base and quantize it in the same way, or take the "
                "trained weights alone with engine.load_checkpoint(load_module_only=True)"
            )


def _sum_of_rank(engine: ZeroEngine, tensor: torch.Tensor) -> int:
    group = owning_group(tensor)
    if group is None:
        if engine.comm.job.rank > 0:
            return 0
        return positional_sum(tensor.detach().contiguous().view(-1), 0)
    if engine.comm.replicate_group.rank > 0:  # another rank has the same shard
        return 0
    version, sums = _sums.get(group, (None, []))
    if version != group.version:
        sums = [0] * len(group.params)
        for piece in group.pieces:
            values = group.shard[piece.start : piece.start + piece.numel]
            sums[piece.slot] += positional_sum(values, piece.inside * values.element_size())
        _sums[group] = group.version, sums
    return sums[group.index[tensor]]


def positional_sum(values: torch.Tensor, position: int) -> int:
    """Over the bytes of `values`, of which the first is at `position` of its tensor."""
    total = 0
    for part in values.view(torch.uint8).split(CHUNK):
        end = position + part.numel()
        weights = torch.arange(position + 1, end + 1, device=part.device)
        total += int((part * weights).sum())
        position = end
    return total
