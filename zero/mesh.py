"""What a `torch.distributed.device_mesh.DeviceMesh` says about groups of ranks. Nothing is communicated.

[Note: dimensions]
replicate, shard   data: ranks with batches of their own. They are one world of the engine, which shards over `shard`.
pipeline, tensor   the model: ranks that differ there hold different parameters, or parts of them.

Every other place along the model's dimensions is a world of its own. `dp_replicate`, `dp_shard`, `pp` and `tp` are
accepted too.
"""

from __future__ import annotations

import sys
from typing import NamedTuple, Protocol

import torch

from zero.errors import UsageError

DATA, MODEL = ("replicate", "shard"), ("pipeline", "tensor")
_LONG = {"dp_replicate": "replicate", "dp_shard": "shard", "pp": "pipeline", "tp": "tensor"}


class Mesh(Protocol):
    """As much of a `DeviceMesh` as is read here."""

    mesh: torch.Tensor
    mesh_dim_names: tuple[str, ...] | None


class Worlds(NamedTuple):
    """Which ranks train the same parameters: one world for each place along the model's dimensions."""

    ranks: list[range]
    shard_size: int


def mesh_of_accelerate() -> Mesh | None:
    """The mesh that the script's `Accelerator` has made of its `ParallelismConfig`, if that says how to shard."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return None
    mesh = getattr(state.AcceleratorState(), "device_mesh", None)
    return mesh if mesh is not None and "dp_shard" in (mesh.mesh_dim_names or ()) else None


def dimension(mesh: Mesh, name: str) -> int:
    """The position of the dimension `name` in the mesh; UsageError if there is none."""
    names = [_LONG.get(each, each) for each in mesh.mesh_dim_names or ()]
    if name not in names:
        raise UsageError(f"mesh: the dimensions are {mesh.mesh_dim_names}; one named {name!r} is missing")
    return names.index(name)


def worlds(mesh: Mesh, world_size: int) -> Worlds:
    """The worlds of a mesh of all ranks of the job, in their order; one world if the mesh has only data dimensions.

    Raises UsageError for other dimensions, for `replicate` and `shard` apart or in another order, for other ranks.
    """
    names = tuple(_LONG.get(each, each) for each in mesh.mesh_dim_names or ())
    data = [place for place, name in enumerate(names) if name in DATA]
    adjacent = data == list(range(data[0], data[0] + len(data))) if data else False
    known = len(set(names)) == len(names) and not set(names) - {*DATA, *MODEL}
    if not known or not adjacent or tuple(names[place] for place in data) not in (("shard",), DATA):
        raise UsageError(
            f"mesh: the dimensions are {mesh.mesh_dim_names}; name them ('replicate', 'shard'), side by side in this "
            "order, or ('shard',); 'pipeline' and 'tensor' may stand beside them"
        )
    if mesh.mesh.flatten().tolist() != list(range(world_size)):
        sizes = " x ".join(map(str, mesh.mesh.shape))
        raise UsageError(
            f"mesh: {sizes} = {mesh.mesh.numel()} ranks; it must have all {world_size} of the job, in their order"
        )
    size = mesh.mesh.shape[data[0] : data[-1] + 1].numel()
    rows = mesh.mesh.movedim(data, list(range(-len(data), 0))).reshape(-1, size).tolist()
    step = mesh.mesh.stride(data[-1])
    return Worlds([range(row[0], row[-1] + 1, step) for row in rows], mesh.mesh.shape[data[-1]])
