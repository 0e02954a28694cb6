"""`deepspeed.utils.groups`: every rank is a data-parallel rank, and there is no other kind of parallelism."""

from __future__ import annotations

from typing import NoReturn

from zero import comm

# These and other modules ask for the group's size and this process's place in it under several names.
get_data_parallel_group = _get_data_parallel_group = _get_sequence_data_parallel_group = comm.get_world_group
get_data_parallel_rank = _get_data_parallel_rank = _get_sequence_data_parallel_rank = comm.get_rank


def _world_size() -> int:
    return comm.get_world_size()


get_data_parallel_world_size = _get_data_parallel_world_size = _get_sequence_data_parallel_world_size = _world_size


def _get_data_parallel_group_ranks() -> range:
    """The ranks of the data-parallel group: all."""
    return range(comm.get_world_size())


def _get_broadcast_src_rank() -> int:
    """The rank whose values the others get where they must be equal."""
    return 0


def _one() -> int:
    return 1


def _zero() -> int:
    return 0


# Model, tensor and sequence parallelism have groups of one rank.
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size = _one
_get_sequence_parallel_world_size = _get_expert_model_parallel_world_size = _one
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_sequence_parallel_rank = _zero


def _get_sequence_parallel_group() -> NoReturn:
    """Refused as by DeepSpeed: KeyError."""
    raise KeyError("there is no sequence-parallel group: every rank is a data-parallel rank")
