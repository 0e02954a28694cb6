"""Reads from a `torch.distributed.device_mesh.DeviceMesh` which ranks share what. Nothing is
communicated.

[Note: dimensions]
pp         pipeline stages: each rank has some of the layers.
replicate  groups of ranks that hold the same shards.
shard      ranks over which ZeRO cuts what each of them has of the model.
tp         tensor parallelism: each rank has a part of each layer.

`replicate` and `shard` together are the data-parallel ranks, each with batches of its own. The
other two make a model group: ranks that hold one copy of the model together and work on the same
batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from zero.errors import UsageError

_OTHER_NAMES = {"dp": "shard", "fsdp": "shard", "dp_shard": "shard", "dp_replicate": "replicate"}
DIMENSIONS = ("pp", "replicate", "shard", "tp")
_DATA = ("replicate", "shard")


def mesh_of_accelerate() -> DeviceMesh | None:
    """The mesh that the script's `Accelerator` has made of its `ParallelismConfig`, if that says
    how to shard.
    """
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return None
    mesh = getattr(state.AcceleratorState(), "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return mesh if {"dp_shard", "tp"} & {*names} else None


def sizes_of(mesh: DeviceMesh, world_size: int) -> dict[str, int]:
    """The size of each dimension of the note, by name, in the mesh's order.

    The names of accelerate (`dp_shard`), transformers (`fsdp`) and DeepSpeed (`dp`) are known too.
    Raises UsageError for any other dimension or order, and for a mesh that does not have all ranks
    of the job, in their order."""
    given = mesh.mesh_dim_names or ()
    names = tuple(_OTHER_NAMES.get(name, name) for name in given)
    if not names or names != tuple(name for name in DIMENSIONS if name in names):
        raise UsageError(
            f"mesh: the dimensions are {given}; name them 'pp', 'replicate', 'shard' and 'tp', in "
            "this order; each may be left out"
        )
    if mesh.mesh.flatten().tolist() != list(range(world_size)):
        product = " x ".join(map(str, mesh.mesh.shape))
        raise UsageError(
            f"mesh: {product} = {mesh.mesh.numel()} ranks; it must have all {world_size} of the "
            "job, in their order"
        )
    return dict(zip(names, mesh.mesh.shape, strict=True))


def groups(sizes: Mapping[str, int], of_data: bool) -> list[list[int]]:
    """The ranks of each data-parallel world, or of each model group, in the mesh's order."""
    order = sorted(range(len(sizes)), key=lambda number: (list(sizes)[number] in _DATA) is of_data)
    ranks = torch.arange(math.prod(sizes.values()), device="cpu")
    ranks = ranks.view(*sizes.values()).permute(order)
    size = math.prod(size for name, size in sizes.items() if (name in _DATA) is of_data)
    return ranks.reshape(-1, size).tolist()
