"""What a `torch.distributed.device_mesh.DeviceMesh` says: the size of a shard group. Nothing is communicated."""

from __future__ import annotations

import sys
from typing import Protocol

import torch

from zero.errors import UsageError


class Mesh(Protocol):
    """As much of a `DeviceMesh` as is read here."""

    mesh: torch.Tensor
    mesh_dim_names: tuple[str, ...] | None


def mesh_of_accelerate() -> Mesh | None:
    """The mesh that the script's `Accelerator` has made of its `ParallelismConfig`, if that says how to shard."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return None
    mesh = getattr(state.AcceleratorState(), "device_mesh", None)
    return mesh if mesh is not None and "dp_shard" in (mesh.mesh_dim_names or ()) else None


def shard_size(mesh: Mesh, world_size: int) -> int:
    """The size of the dimension `shard`; another one, before it, may be `replicate`: the names of FSDP2's examples.

    `dp_shard` and `dp_replicate` are the same. Raises UsageError for any other mesh, and for one that does not have all
    ranks of the job, in their order.
    """
    names = tuple(name.removeprefix("dp_") for name in mesh.mesh_dim_names or ())
    if names not in (("shard",), ("replicate", "shard")):
        raise UsageError(
            f"mesh: the dimensions are {mesh.mesh_dim_names}; name them ('replicate', 'shard'), in this order, or "
            "('shard',)"
        )
    if mesh.mesh.flatten().tolist() != list(range(world_size)):
        sizes = " x ".join(map(str, mesh.mesh.shape))
        raise UsageError(
            f"mesh: {sizes} = {mesh.mesh.numel()} ranks; it must have all {world_size} of the job, in their order"
        )
    return mesh.mesh.shape[-1]
