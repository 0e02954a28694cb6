"""DeepSpeed's names for sequence parallelism, as accelerate and the Trainer call them.
`zero.parallel.sequence` does the work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero.comm import world
from zero.config import Config
from zero.errors import UsageError
from zero.parallel.sequence import SequenceGroup, attach, current_group, detach, make_group, tiled

logger = logging.getLogger("zero")


def sequence_group() -> SequenceGroup:
    """The group that was made last. Raises UsageError if there is none."""
    if (ranks := current_group()) is None:
        call = "UlyssesSPAttentionHF.register_with_transformers"
        raise UsageError(f"there is no sequence-parallel group: call {call}")
    return ranks


class Mpu:
    """What `register_with_transformers` returns, and `initialize` takes to know of other dimensions
    than data.
    """

    in_eval = True

    def get_sequence_parallel_world_size(self) -> int:
        """How many ranks share a sequence."""
        return sequence_group().size


class UlyssesSPAttentionHF:
    """Where accelerate switches sequence parallelism on. It has no instances."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: nn.Module | str,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        *,
        disable_in_eval: bool = False,
        **_sizes: object,
    ) -> Mpu | None:
        """Make the groups, and return what `initialize` needs to attach them to a model. None for
        one rank a sequence.

        Args:
            core_attn_implementation: the model's own, which it must be (None: not checked).
            disable_in_eval: a model that is not training gets whole sequences.

        The sizes of batches and sequences may differ from batch to batch; what the call says of
        them has no effect.
        """
        if sequence_parallel_size == 1:
            return None
        own = getattr(getattr(model_name_or_path, "config", None), "_attn_implementation", None)
        if core_attn_implementation is not None and own not in (None, core_attn_implementation):
            raise UsageError(
                f"sp_attn_implementation (core_attn_implementation) is {core_attn_implementation!r}"
                f", and the model's attn_implementation is {own!r}: give both the same value"
            )
        world.init_distributed()
        make_group(sequence_parallel_size)
        mpu = Mpu()
        mpu.in_eval = not disable_in_eval
        return mpu


class TiledMLP:
    """DeepSpeed's name for `zero.parallel.sequence.tiled`: `fn(self, x)` for parts of x along its
    last dimension but one.

    DeepSpeed's is an autograd function, of which scripts call `apply`. `compute_params` has no
    effect: the engine gets one gradient of each parameter anyway."""

    @staticmethod
    def apply(
        fn: Callable[[nn.Module, torch.Tensor], torch.Tensor],
        self: nn.Module,
        x: torch.Tensor,
        shards: int,
        compute_params: Any = None,
    ) -> torch.Tensor:
        return tiled(lambda part: fn(self, part), x, tiles=shards, dim=-2)


def share_sequences(model: nn.Module, settings: Config, mpu: Any = None) -> Config:
    """Attach the model to the group of `mpu`, or of `sequence_parallel_size`.

    Returns the settings with that size.
    """
    size = settings.sequence_parallel_size
    if mpu is not None:
        if not hasattr(mpu, "get_sequence_parallel_world_size"):
            missing = "get_sequence_parallel_world_size: no other mpu is supported"
            raise UsageError(f"initialize: mpu has no {missing}")
        of_mpu = mpu.get_sequence_parallel_world_size()
        if size not in (1, of_mpu):
            message = f"is {size}, and the mpu's is {of_mpu}; delete it"
            raise UsageError(f"sequence_parallel_size: {message}")
        size = of_mpu
    detach(model)
    if size > 1:
        _warn_of_replicas()
        attach(model, make_group(size), in_eval=getattr(mpu, "in_eval", True))
    return settings.model_copy(update={"sequence_parallel_size": size})


def _warn_of_replicas() -> None:
    """Warn that replicas have no effect: accelerate creates no mesh from a `ParallelismConfig` with
    `sp_size`, so the engine does not learn of them.
    """
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized() or world.get_rank() > 0:
        return
    replicas = getattr(state.AcceleratorState().parallelism_config, "dp_replicate_size", 1)
    if replicas > 1:
        logger.warning(
            "ParallelismConfig: dp_replicate_size %d makes no replicas beside sp_size: ZeRO shards "
            "over all processes. Set zero_optimization.mics_shard_size for groups that hold all "
            "shards, and give dp_shard_size instead",
            replicas,
        )
