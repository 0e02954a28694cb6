"""The names of `deepspeed.comm` and `deepspeed.utils.groups` that `zero.comm.world` does not have.
No collective is here.

Ranks may share sequences (`zero.parallel.sequence`), or the model: then the data-parallel ranks
are those that have what this one has of it. Else they are all ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zero.comm import world
from zero.parallel.sequence import current_group


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """`zero.comm.world.init_distributed`; accelerate calls it in the middle of making its state."""
    world.init_distributed(*args, **kwargs)
    _complete_state_of_accelerate()


def is_initialized() -> bool:
    """Whether there is a process group. If so, accelerate does not call `init_distributed`."""
    initialized = world.is_initialized()
    if initialized:
        _complete_state_of_accelerate()
    return initialized


def _complete_state_of_accelerate() -> None:
    """Complete the state that accelerate is making, if it found no backend for its device.

    It finds none on a machine without an accelerator that it knows. Then it would treat each rank
    as the only one, and might choose a device on which the engine does not compute."""
    accelerate_state = sys.modules.get("accelerate.state")
    if accelerate_state is None or not accelerate_state.PartialState._shared_state:
        return
    state = accelerate_state.PartialState()
    if state.backend is None:
        state.backend = world.get_backend()
        state.device = state.device or world.compute_device()


def get_local_rank() -> int:
    """This process's rank on its host, as the launcher numbers it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _get_sequence_parallel_group() -> object:
    """The ranks that share sequences with this one.

    KeyError without such ranks, as by DeepSpeed.
    """
    if (ranks := current_group()) is None:
        raise KeyError("there is no sequence-parallel group: every rank is a data-parallel rank")
    return ranks.group


def _get_sequence_parallel_world_size() -> int:
    ranks = current_group()
    return 1 if ranks is None else ranks.size


def _get_sequence_parallel_rank() -> int:
    ranks = current_group()
    return 0 if ranks is None else ranks.rank


# With the dimensions "pipeline", "data", "sequence" and "tensor". None: each rank has all of the
# model, and samples of its own.
_mesh: DeviceMesh | None = None
_mesh_world: object = None  # the process group of all ranks at that time


def set_parallel_sizes(pipeline: int, tensor: int, device: torch.device, sequence: int = 1) -> None:
    """Note how many stages the model has, how many ranks share each layer, and how many each
    sample. All ranks must call it.
    """
    global _mesh, _mesh_world
    everyone = world.get_world_group()
    ranks = torch.arange(world.get_world_size(), device="cpu").view(pipeline, -1, sequence, tensor)
    if pipeline == tensor == sequence == 1:
        _mesh = None
    elif _mesh is None or _mesh_world is not everyone or not torch.equal(_mesh.mesh, ranks):
        names = ("pipeline", "data", "sequence", "tensor")
        _mesh = DeviceMesh(device.type, ranks, mesh_dim_names=names)
        _mesh_world = everyone


def _get_data_parallel_group() -> Any:
    """The ranks with batches of their own that have what this one has of the model."""
    return world.get_world_group() if _mesh is None else _mesh.get_group("data")


def _get_data_parallel_rank() -> int:
    return world.get_rank() if _mesh is None else _mesh.get_local_rank("data")


def _get_data_parallel_world_size() -> int:
    return world.get_world_size() if _mesh is None else _mesh.size(1)


def _get_model_parallel_group() -> Any:
    """The ranks that share each layer, and work on the same batch."""
    if _mesh is None or _mesh.size(3) == 1:
        raise KeyError("there is no tensor-parallel group: every rank has the whole model")
    return _mesh.get_group("tensor")


def _get_model_parallel_rank() -> int:
    return 0 if _mesh is None else _mesh.get_local_rank("tensor")


def _get_model_parallel_world_size() -> int:
    return 1 if _mesh is None else _mesh.size(3)
