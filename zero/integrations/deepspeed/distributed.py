"""The names of `deepspeed.comm` and `deepspeed.utils.groups` that `zero.comm.world` does not have.
No collective is here.

Ranks may share sequences (`zero.parallel.sequence`); the other groups are those of all ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

from zero.comm import world
from zero.parallel.sequence import current_group


def init_distributed(dist_backend: str | None = None, **kwargs: Any) -> None:
    """`zero.comm.world.init_distributed`; accelerate calls it in the middle of making its state."""
    world.init_distributed(dist_backend, **kwargs)
    _tell_accelerate_the_backend()


def is_initialized() -> bool:
    """`zero.comm.world.is_initialized`; if it is true, accelerate goes on without a call of
    `init_distributed`.
    """
    initialized = world.is_initialized()
    if initialized:
        _tell_accelerate_the_backend()
    return initialized


def _tell_accelerate_the_backend() -> None:
    """Complete the state that accelerate is making, if it found no backend for its device.

    It finds none on a machine without an accelerator. Then it would treat each rank as the only
    one."""
    accelerate_state = sys.modules.get("accelerate.state")
    if accelerate_state is None or not accelerate_state.PartialState._shared_state:
        return
    state = accelerate_state.PartialState()
    if state.backend is None:
        state.backend = world.get_backend()


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
