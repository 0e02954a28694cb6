"""Attention of transformers' models over sequences that a group of ranks shares.

transformers has a register of attention functions by name ("sdpa", "eager", ...), and one of
functions that make their masks. The functions here wrap the registered ones. They act for the
models that `attach` was called with, and pass the calls of all others on."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zero.errors import UsageError, require_divisor
from zero.parallel.sequence.group import SequenceGroup

# Other kinds of layers pass something from token to token, which the pieces of a sequence would not
# do.
_KINDS_OF_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Functions that find the ends of packed sequences in the mask. Others, such as flash attention,
# need the positions.
_READS_THE_MASK = {"sdpa", "eager", "flex_attention"}


def _error(what: str) -> UsageError:
    return UsageError(f"sequence parallelism: {what}")


class _Whole(NamedTuple):
    """What a forward in progress knows of the whole sequence; all are (batch, sequence)."""

    ranks: SequenceGroup
    mask: torch.Tensor | None
    positions: torch.Tensor
    documents: torch.Tensor | None  # the number of the packed sequence that a token belongs to


_forward: _Whole | None = None  # of a model that `attach` was called with
_models: WeakKeyDictionary[nn.Module, _Model] = WeakKeyDictionary()  # by each of their modules
_cores: dict[str, Callable | None] = {}


class _Model:
    """A model whose sequences are shared. `in_eval`: also where it is not training."""

    def __init__(self, model: nn.Module, config: Any, ranks: SequenceGroup, in_eval: bool):
        self.ranks = ranks
        self.in_eval = in_eval
        self.calls = 0
        self.has_chunks = getattr(config, "attention_chunk_size", None) is not None

        # Functions, not methods: a copy of the model shares them, and is not known here.
        self.handles = [
            model.register_forward_pre_hook(lambda *given: self.before(*given), with_kwargs=True),
            model.register_forward_hook(lambda *given: self.after(*given), always_call=True),
        ]

    def acts(self, module: nn.Module) -> bool:
        return (module.training or self.in_eval) and _models.get(module) is self

    def before(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Gather what the masks are made of, before the forward of the whole model."""
        global _forward
        if not self.acts(module):
            return None
        given = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args]
        piece = next(value for value in given if isinstance(value, torch.Tensor))
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is not None and mask.shape != piece.shape[:2]:
            raise _error(
                f"attention_mask of shape {tuple(mask.shape)} does not belong to a piece of shape "
                f"{tuple(piece.shape[:2])}: give (batch, piece)"
            )
        if positions is None:
            first = self.ranks.rank * piece.shape[1]
            positions = torch.arange(first, first + piece.shape[1], device=piece.device)[None]
        positions = positions.expand(piece.shape[:2])
        whole = self.ranks.gather(positions)
        # As transformers does: with a mask, positions do not separate sequences.
        documents = _documents(whole) if mask is None else None
        whole_mask = None if mask is None else self.ranks.gather(mask).bool()
        # No token attends to a later one, so padding on the right needs no square mask.
        if whole_mask is not None and not (whole_mask[:, 1:] & ~whole_mask[:, :-1]).any():
            whole_mask = None
        _forward, self.calls = _Whole(self.ranks, whole_mask, whole, documents), 0
        if self.has_chunks and whole_mask is not None:
            raise _error("attention in chunks takes padding on the right only")
        if mask is None or self.has_chunks:
            # With a mask, transformers does not look for packed sequences in this piece. Otherwise
            # chunk borders would shift by this piece's padding.
            mask = torch.ones(piece.shape[:2], dtype=torch.bool, device=piece.device)
        return args, {**kwargs, "attention_mask": mask, "position_ids": positions}

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        global _forward
        ended, _forward = _forward, None
        if output is not None and ended is not None and not self.calls:
            raise _error(
                f"{type(module).__name__} has called none of transformers' attention functions, so "
                "each rank has attended to its own piece only: this model is not supported"
            )


def attach(model: nn.Module, ranks: SequenceGroup, in_eval: bool = True) -> None:
    """Have a model of transformers attend to whole sequences, while each rank of the group gives it
    a piece.

    Args:
        model: a causal language model, or a wrapper that has its `config` and passes
            `attention_mask` and `position_ids` on. Call it with (batch, piece) tensors:
            `input_ids`, and optionally these two; positions are numbers in the whole sequence.
        in_eval: False leaves the model alone while it is not training: each rank has sequences of
            its own there.

    Raises UsageError, naming the numbers, if the group's size does not divide the heads; and for
    models whose tokens depend on others outside of causal attention.
    """
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if not hasattr(config, "get_text_config"):
        raise _error(f"{name} is not a model of transformers: no config")
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)
    require_divisor("sequence_parallel_size", ranks.size, "the model's attention heads", heads)
    others = {*(getattr(text, "layer_types", None) or ())} - _KINDS_OF_LAYERS
    if getattr(config, "is_encoder_decoder", False) or others:
        kind = f"layers of type {sorted(others)}" if others else "an encoder and a decoder"
        raise _error(f"not for {name}, which has {kind}")
    detach(model)
    known = _Model(model, text, ranks, in_eval)
    for module in model.modules():
        _models[module] = known
        if implementation := getattr(getattr(module, "config", None), "_attn_implementation", None):
            _wrap(implementation)


def is_shared_already() -> bool:
    """Whether the forward in progress is one of a model that `attach` was called with."""
    return _forward is not None


def detach(model: nn.Module) -> None:
    """Undo `attach`, if there was one."""
    for module in model.modules():
        if (known := _models.pop(module, None)) is not None:
            for handle in known.handles:
                handle.remove()


def _wrap(implementation: str) -> None:
    """Register the functions of this file in place of transformers' own of that name, once."""
    if implementation in _cores:
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    core = _cores[implementation] = ALL_ATTENTION_FUNCTIONS.get(implementation)

    @torch.compiler.disable
    def attention(module: nn.Module, *tensors: Any, **kwargs: Any) -> tuple:
        call = core or _eager_function(module)
        model = _models.get(module)
        if model is None or not model.acts(module):
            return call(module, *tensors, **kwargs)
        model.calls += 1
        return _attend(call, implementation, model.ranks, module, *tensors, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(implementation, attention)
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        make = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
        ALL_MASK_ATTENTION_FUNCTIONS.register(
            implementation, lambda **given: make(**_for_whole_sequences(given))
        )


def _eager_function(module: nn.Module) -> Callable:
    """Each modeling file defines its own eager attention, which is not registered."""
    for kind in type(module).__mro__:
        if function := getattr(sys.modules[kind.__module__], "eager_attention_forward", None):
            return function
    raise UsageError(
        f"attn_implementation 'eager': {type(module).__name__} has no eager_attention_forward"
    )


def _attend(
    core: Callable, name: str, ranks: SequenceGroup, module: Any, *tensors: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """`core` on whole sequences and some of the heads. (batch, heads, piece, ...) to (batch, piece,
    heads, ...).
    """
    query, key, value, *mask = tensors
    kind = type(module).__name__
    is_causal = getattr(module, "is_causal", True) and kwargs.get("is_causal") is not False
    if query.shape[2] != key.shape[2] or not is_causal:
        raise _error(f"{kind} is not causal attention of a sequence to itself without a cache")
    per_head = (kwargs.get("s_aux"), kwargs.get("position_bias"), getattr(module, "sinks", None))
    if any(values is not None for values in per_head):
        raise _error(f"{kind} has values of each head (sinks, position bias): not supported")
    if kwargs.get("position_ids") is not None and name not in _READS_THE_MASK:
        kwargs["position_ids"] = ranks.gather(kwargs["position_ids"].expand(query.shape[0], -1))
    # Ranks that share a head of keys and values all need it.
    repeats = ranks.size // math.gcd(key.shape[1], ranks.size)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    query, key, value = (
        ranks.all_to_all(tensor, scatter_dim=1, gather_dim=2) for tensor in (query, key, value)
    )
    groups = getattr(module, "num_key_value_groups", 1)
    try:
        if repeats > 1:
            module.num_key_value_groups = groups // repeats
        output, _ = core(module, query, key, value, *mask, **kwargs)
    finally:
        if repeats > 1:
            module.num_key_value_groups = groups
    return ranks.all_to_all(output, scatter_dim=1, gather_dim=2), None


def _for_whole_sequences(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments for making a mask, of whole sequences instead of pieces."""
    if _forward is None:
        return given
    ranks, mask, positions, documents = _forward
    if "q_length" not in given:
        raise _error("masks for whole sequences need transformers 5.6 or newer")
    if given["q_length"] != given["kv_length"]:
        raise _error("attention to a cache of earlier tokens is not supported")
    if given.get("use_vmap"):
        raise _error("this model adds its own mask, which cannot be built for the whole sequence")
    length = given["q_length"] * ranks.size
    given = {**given, "q_length": length, "kv_length": length, "attention_mask": mask}
    if documents is not None:
        given["mask_function"] = _within_documents(given["mask_function"], positions, documents)
        given["allow_is_causal_skip"] = False
    return given


def _documents(positions: torch.Tensor) -> torch.Tensor | None:
    """Numbers of packed sequences: a new one starts where position is not the previous + 1.

    None without packing.
    """
    starts = positions.diff(dim=1) != 1
    return nn.functional.pad(starts.cumsum(dim=1), (1, 0)) if starts.any() else None


def _within_documents(
    mask_function: Callable, positions: torch.Tensor, documents: torch.Tensor
) -> Callable:
    """The same mask for each packed sequence, and nothing between them."""

    def function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        inside = mask_function(batch, head, positions[batch, query], positions[batch, key])
        return (documents[batch, query] == documents[batch, key]) & inside

    return function
