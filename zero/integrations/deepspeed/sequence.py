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
from zero.integrations.deepspeed import distributed
from zero.parallel.sequence import (
    all_to_all,
    attach,
    detach,
    is_shared_already,
    make_group,
    tiled,
)

logger = logging.getLogger("zero")


class Mpu:
    """What `register_with_transformers` returns, and `initialize` takes to know of other dimensions
    than data.
    """

    in_eval = True
    get_sequence_parallel_world_size = staticmethod(distributed._get_sequence_parallel_world_size)
    get_sequence_parallel_rank = staticmethod(distributed._get_sequence_parallel_rank)
    get_sequence_parallel_group = staticmethod(distributed._get_sequence_parallel_group)


class UlyssesSPAttentionHF:
    """Where accelerate switches sequence parallelism on. It has no instances."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: nn.Module | str,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Mpu | None:
        """Make the groups, and return what `initialize` needs to attach them to a model. None for
        one rank a sequence.

        Args:
            core_attn_implementation: the model's own, which it must be (None: not checked).
            disable_in_eval: a model that is not training gets whole sequences.

        The sizes of batches and sequences may differ from batch to batch; the arguments that give
        them have no effect.
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


class DistributedAttention(nn.Module):
    """Ulysses for any model: `local_attention` works on whole sequences and on some of the heads,
    and everything around it on a piece of the sequence and on all heads.

    Args:
        local_attention: a module or a function of query, key, value and further arguments.
        sequence_process_group: the ranks that share each sequence, in the order of the pieces.
        scatter_idx: the dimension of the heads.
        gather_idx: the dimension of the sequence.
        sp_stream: has no effect.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: object = None,
    ):
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: object = None,
        rotary_pos_emb: object = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The attention of this rank's piece; `args` and `kwargs` are passed on.

        `batch_dim_idx` has no effect. Raises UsageError for `rotary_pos_emb`, and if the group's
        size does not divide the heads.
        """
        if rotary_pos_emb is not None:
            raise UsageError(
                "DistributedAttention: rotary_pos_emb is not supported: turn query and key before"
            )
        if is_shared_already():
            raise UsageError(
                "DistributedAttention: the sequences of this model are shared already; make it "
                "before initialize, which then leaves the sharing to it"
            )
        whole = [
            all_to_all(tensor, self.spg, self.scatter_idx, self.gather_idx)
            for tensor in (query, key, value)
        ]
        mixed = self.local_attn(*whole, *args, **kwargs)
        return all_to_all(mixed, self.spg, self.gather_idx, self.scatter_idx)


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


def share_sequences(
    model: nn.Module, settings: Config, mpu: Any = None, mesh_param: Any = None
) -> tuple[Config, int]:
    """Attach the model to the group of `mpu`, of `mesh_param` or of `sequence_parallel_size`.

    Returns the settings with that size; and the number of neighbouring ranks that read the same
    samples. These are more than one where the model itself shares sequences: it is not one of
    transformers', or has a `DistributedAttention`.
    """
    given = settings.sequence_parallel_size
    sizes = {"sequence_parallel_size": given} if given > 1 else {}
    shares_itself = any(isinstance(module, DistributedAttention) for module in model.modules())
    if mesh_param is not None:
        sizes["the second number of mesh_param"] = _size_in(mesh_param)
        of_transformers = hasattr(getattr(model, "config", None), "get_text_config")
        shares_itself = shares_itself or not of_transformers
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        sizes["that of the mpu"] = mpu.get_sequence_parallel_world_size()
    elif mpu is not None:
        _check_tensor_parallel(mpu, settings)
    size, *others = set(sizes.values()) or {1}
    if others:
        text = " and ".join(f"{name} is {size}" for name, size in sizes.items())
        raise UsageError(f"{text}: give only one of them")
    detach(model)
    if size > 1:
        _warn_of_replicas()
        ranks = make_group(size)
        if not shares_itself:
            attach(model, ranks, in_eval=getattr(mpu, "in_eval", True))
    settings = settings.model_copy(update={"sequence_parallel_size": size})
    return settings, size if shares_itself else 1


def _check_tensor_parallel(mpu: Any, settings: Config) -> None:
    """Raise UsageError unless `mpu` has the same tensor-parallel groups as the configuration."""
    size = settings.tensor_parallel.autotp_size
    if not hasattr(mpu, "get_model_parallel_group"):
        missing = "get_sequence_parallel_world_size and no get_model_parallel_group"
        raise UsageError(f"initialize: mpu has no {missing}: no other mpu is supported")
    ranks = torch.distributed.get_process_group_ranks(mpu.get_model_parallel_group())
    first = world.get_rank() // size * size
    if ranks != list(range(first, first + size)):
        raise UsageError(
            f"initialize: mpu shares the model over the ranks {ranks}, and "
            f"tensor_parallel.autotp_size is {size}: it must be {len(ranks)}, and its ranks "
            "neighbours; the model is split by tensor_parallel"
        )


def _size_in(mesh_param: Any) -> int:
    """The number of ranks that share a sequence in DeepSpeed's `mesh_param`."""
    ranks = world.get_world_size()
    try:
        data, size = map(int, mesh_param)
    except (TypeError, ValueError):
        data = size = 0
    if size < 1 or data * size != ranks:
        raise UsageError(
            f"initialize: mesh_param is {mesh_param}; it must be (data, sequence), two numbers "
            f"whose product is the number of ranks, {ranks}"
        )
    return size


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
            "ParallelismConfig: dp_replicate_size %d creates no replicas together with sp_size: "
            "ZeRO shards over all processes. Set zero_optimization.mics_shard_size for groups that "
            "hold all shards, and give dp_shard_size instead",
            replicas,
        )
