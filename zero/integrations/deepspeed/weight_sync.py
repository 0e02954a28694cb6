"""`deepspeed.zero.GatheredParameters`: that of zero, unless TRL sends its weights to a generator,
or transformers initializes a part of a model.

TRL gathers a whole model with adapters to merge them and to send the weights, and gathers
everything one more time only to learn names and shapes. Its functions are known to read the same
parameters on every rank, so these contexts gather block by block, or nothing. Other callers may not
do so: if only rank 0 reads, the other ranks would not take part in the gather."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn

from zero.comm.world import get_rank
from zero.core.sharded_param import PlaceholderView
from zero.gathered_parameters import GatheredParameters as EagerGatheredParameters
from zero.streaming import GatheredWhenRead

# Frames between TRL's function and this one: contextlib's, and that of `gather_params`.
_DEPTH = 3


def GatheredParameters(  # noqa: N802 (DeepSpeed's name)
    params: nn.Parameter | Iterable[nn.Parameter] | nn.Module,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """As `zero.GatheredParameters`. In TRL's synchronization of weights with vLLM, parameters are
    gathered when they are read, see `zero.streaming.GatheredWhenRead`.
    """
    if enabled and modifier_rank is None:
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_DEPTH):
            if frame is not None and (context := _of_weight_sync(frame)) is not None:
                return context
            frame = frame and frame.f_back
    elif enabled:
        _note_initialized(sys._getframe(1))
    return EagerGatheredParameters(params, modifier_rank, fwd_module, enabled)


def _note_initialized(frame: FrameType) -> None:
    """Note on the other ranks that rank 0 initializes a module.

    transformers notes it on rank 0 alone. If the model is a part of another one, such as CLIP's
    text model, the others would initialize the sharded weights again.
    """
    function = frame.f_globals.get("__name__"), frame.f_code.co_name
    if function == ("transformers.integrations.deepspeed", "_apply_zero3") and get_rank():
        frame.f_locals["model_or_module"]._is_hf_initialized = True


def _of_weight_sync(frame: FrameType) -> AbstractContextManager[None] | None:
    """The context for this frame, if it is of one of TRL's functions that send weights, and every
    rank reads what it gathers.
    """
    function = frame.f_globals.get("__name__"), frame.f_code.co_name
    owner: Any = frame.f_locals.get("self")
    names_only = False
    if function == ("trl.generation.vllm_generation", "_iter_named_params"):
        # A release of TRL that has no such attribute gets all values.
        is_first = getattr(owner, "_weight_metadata", ()) is None
        names_only = is_first and getattr(owner, "mode", None) == "server"
    elif function == (
        "trl.experimental.online_dpo.online_dpo_trainer",
        "_move_model_to_vllm_inner",
    ):
        if getattr(owner, "vllm_mode", None) != "colocate":
            return None  # rank 0 alone reads
    else:
        return None
    model = getattr(owner, "model", None)
    if not isinstance(model, nn.Module) or not hasattr(model, "merge_adapter"):
        # Without adapters, each parameter has a context of its own.
        return nullcontext() if names_only else None
    return GatheredWhenRead(model, names_only) if GatheredWhenRead.serves(model) else None


def _values_for_hash(view: PlaceholderView) -> torch.Tensor | None:
    """The values of a view for TRL's `hash_module`, which each rank calls with the same model; None
    for other code.
    """
    frame = sys._getframe(2)
    function = frame.f_globals.get("__name__"), frame.f_code.co_name
    if function != ("trl.trainer.utils", "hash_module"):
        return None
    with EagerGatheredParameters(view.param):
        return view.param.detach().to("cpu", view.dtype, copy=True)


def register() -> None:
    """From now on, TRL finds out whether two sharded models have the same weights."""
    PlaceholderView.values_for_caller = staticmethod(_values_for_hash)
