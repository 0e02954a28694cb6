"""Identifies the quantized base of a model, which checkpoints do not contain, so that training does
not continue on a different one.

Each rank sums the bytes of each layer in its shards, each byte multiplied by its position. The sums
do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zero.comm.communicator import Communicator
from zero.core.param_group import ParamGroup
from zero.core.quantized_weights import keeps_codes_in_buffers, quantized_tensors
from zero.core.sharded_param import owning_group
from zero.errors import UsageError

# For each layer, the number of its bytes and their sum.
Sums = Mapping[str, Sequence[int]]

# The number of bytes summed at a time. As 64-bit integers they take eight times the memory.
CHUNK = 1 << 20
# Sums are kept modulo this number, because those of 64-bit integers wrap around.
MODULUS = 1 << 53

# For each group, the version of its values, and the byte sum of each parameter in the shard.
_sums: WeakKeyDictionary[ParamGroup, tuple[int, list[int]]] = WeakKeyDictionary()


def base_layers(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each quantized layer, by the layer's name."""
    buffers = None if keeps_codes_in_buffers(model) else False
    layers = {
        name: [each.tensor for each in quantized_tensors(module, buffers)]
        for name, module in model.named_modules()
    }
    return {name: tensors for name, tensors in layers.items() if tensors}


def sums_of_rank(model: nn.Module, comm: Communicator) -> Sums:
    """Return this rank's part of the sums: those of its shards, and on rank 0 of unsharded tensors.

    Empty if the model is split over a model group."""
    found: dict[str, tuple[int, int]] = {}
    if comm.model is not None:
        return found
    for name, tensors in base_layers(model).items():
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        found[name] = nbytes, sum(_sum_of_rank(tensor, comm) for tensor in tensors)
    return found


def total(of_ranks: Sequence[Sums]) -> Sums:
    """Return the sums over all ranks."""
    return {
        name: (nbytes, sum(sums[name][1] for sums in of_ranks) % MODULUS)
        for name, (nbytes, _) in of_ranks[0].items()
    }


def require_same_base(stored: Sums, here: Sums) -> None:
    """Raise UsageError, naming a layer, if the model's base differs from the checkpoint's."""
    for name in sorted(stored.keys() | here.keys()):
        if list(stored.get(name, ())) != list(here.get(name, ())):
            raise UsageError(
                f"the quantized layer {name!r} of the model is not the one that the checkpoint was "
                "trained with: load the same base and quantize it in the same way, or take the "
                "trained weights alone with engine.load_checkpoint(load_module_only=True)"
            )


def _sum_of_rank(tensor: torch.Tensor, comm: Communicator) -> int:
    group = owning_group(tensor)
    if group is None:
        if comm.job.rank > 0:
            return 0
        return positional_sum(tensor.detach().contiguous().view(-1), 0)
    if comm.replicate_group.rank > 0:  # another rank has the same shard
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
    """Sum the bytes of `values`, the first of which is at `position` in its tensor."""
    total = 0
    for part in values.view(torch.uint8).split(CHUNK):
        end = position + part.numel()
        weights = torch.arange(position + 1, end + 1, device=part.device)
        total += int((part * weights).sum())
        position = end
    return total
