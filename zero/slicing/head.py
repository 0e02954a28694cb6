"""A head whose logits exist only in chunks of tokens: `activation_checkpointing.batch_slices`.

With a vocabulary of 128,256 words, the logits of 65,536 tokens take 34 GB in fp32, and a loss makes
several tensors of their size. Here the head returns `Logits` instead, which know the hidden states
and what a model or script has done with the logits so far: a cast, a scale, a soft cap, a shift, a
`view`. Only what leaves one value, or a few, for each token is computed: a cross-entropy, a
`gather` of log-probabilities, a sum, a maximum. It is computed chunk by chunk in a call of the
head, which gathers the weights once; each chunk is recomputed in backward. (Cut Cross-Entropy,
arXiv 2411.09009, and Liger, arXiv 2410.10989, compute one loss in this way.)

Anything else needs the logits as a whole, and gets them. Each row of the logits must depend on the
same row of the hidden states alone, so the head must consist of known modules without dropout."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from zero.core.sharded_param import cut_of, needs_values, written_by
from zero.errors import UsageError
from zero.slicing.known import why_hooked, why_not_known

logger = logging.getLogger("zero")

# Logits of one chunk. In fp32 they take 64 MiB on a CPU, and 512 MiB on an accelerator, where each
# chunk adds to a gradient of the size of the weights.
CHUNK_ELEMENTS = {"cpu": 2**24}
CHUNK_ELEMENTS_ELSEWHERE = 2**27
# What gives each row from the same row, by the names of torch's functions.
_OF_EACH_ROW = frozenset(
    "float double half bfloat16 to type contiguous clone detach neg exp tanh sigmoid clamp mul "
    "rmul div truediv true_divide add radd sub pow softmax log_softmax".split()
)
# What leaves a few values of each row: of its last dimension.
_OVER_A_ROW = frozenset("sum mean logsumexp amax argmax gather".split())
_TAKE_A_DIM = _OVER_A_ROW | {"softmax", "log_softmax"}
_KEEP_ROWS = frozenset("view reshape flatten squeeze unsqueeze".split())


def sliced_head(model: nn.Module) -> SlicedHead | None:
    """Slice the head of one of transformers' models; None if it has none, or an unknown one."""
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if not isinstance(head, nn.Module) or not any(True for _ in head.parameters()):
        return None
    drops = any(isinstance(each, nn.Dropout) and each.p for each in head.modules())
    is_cut = any(cut_of(param) is not None for param in head.parameters())
    return None if drops or is_cut or why_not_known(head) else SlicedHead(head)


class SlicedHead:
    """Replaces the forward of a head, (..., hidden size) to (..., vocabulary)."""

    def __init__(self, module: nn.Module):
        self.module: Any = module
        self._forward: Callable[..., torch.Tensor] = module.forward
        self._task: Callable[[Callable], torch.Tensor] | None = None
        module.forward = self
        # If the chunks' gradients had 16 bits, each addition would round. (torch 2.10 and newer.)
        self._summed: list[Any] = [
            param
            for param in module.parameters()
            if param.requires_grad and hasattr(torch.Tensor, "grad_dtype")
        ]
        for param in self._summed:
            param.grad_dtype = torch.float32

    def remove(self) -> None:
        """Restore the head's own forward and the dtype of its gradients."""
        del self.module.forward
        for param in self._summed:
            param.grad_dtype = param.dtype

    def __deepcopy__(self, memo: dict) -> Callable:
        """A copy of the head is an ordinary module."""
        return MethodType(type(self.module).forward, memo[id(self.module)])

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._task is not None:
            task, self._task = self._task, None
            return task(self._forward)
        if len(args) == 1 and not kwargs and self._is_sliced(hidden := args[0]):
            with torch.no_grad():
                sample = self._forward(hidden.flatten(0, -2)[:0])
            if hidden.shape[:-1].numel() > rows_of_chunk(sample):
                return _Rows(self, hidden, (), sample, _autocast(hidden.device.type)).logits()
        return self._forward(*args, **kwargs)

    def _is_sliced(self, hidden: torch.Tensor) -> bool:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if hidden.dim() < 2 or not hidden.requires_grad:
            return False
        # Not in a transform of torch.func, nor with another library's kernel for the loss.
        in_transform = peek_interpreter_stack() is not None
        is_torch = functional.cross_entropy.__module__ == functional.__name__
        return is_torch and not in_transform and not why_hooked(self.module, with_own=True)

    def run(self, hidden: torch.Tensor, task: Callable[[Callable], torch.Tensor]) -> torch.Tensor:
        """Call the head, which gathers its weights, and compute `task(its own forward)` in it."""
        self._task = task
        try:
            return self.module(hidden)
        finally:
            self._task = None


def rows_of_chunk(sample: torch.Tensor) -> int:
    """The number of tokens in a chunk of logits like `sample`, (any, vocabulary)."""
    elements = CHUNK_ELEMENTS.get(sample.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    return max(1, elements // max(1, sample.shape[-1]))


def _autocast(device_type: str) -> dict[str, Any]:
    enabled = torch.is_autocast_enabled(device_type)
    return {
        "device_type": device_type,
        "enabled": enabled,
        "dtype": torch.get_autocast_dtype(device_type) if enabled else None,
    }


@dataclass(frozen=True, eq=False)
class _Rows:
    """How to compute the rows of some logits.

    Attributes:
        hidden: (..., hidden size), what the head is given.
        steps: what is done with its result, (n, vocabulary) to (n, vocabulary) for any n.
        sample: (0, vocabulary), no rows: of the dtype and on the device that the logits have.
        autocast: of the head's call.
    """

    head: SlicedHead
    hidden: torch.Tensor
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    sample: torch.Tensor
    autocast: dict[str, Any]

    def logits(self) -> Logits:
        made = _InGraph.apply(self.hidden, self)
        made.rows = self
        return made

    def new(self) -> Logits:
        """The tensor, which has no memory."""
        shape = (*self.hidden.shape[:-1], self.sample.shape[-1])
        like = {"dtype": self.sample.dtype, "device": self.sample.device}
        return torch.Tensor._make_wrapper_subclass(Logits, shape, **like)

    def whole(self) -> torch.Tensor:
        """All logits, (..., vocabulary)."""
        with torch.autocast(**self.autocast):
            return self.head.run(self.hidden, lambda forward: self._of(forward, self.hidden))

    def _of(self, forward: Callable, hidden: torch.Tensor) -> torch.Tensor:
        logits = forward(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits

    def reduced(self, function: Callable[..., torch.Tensor], *of_rows: torch.Tensor) -> Any:
        """`function`(logits (n, vocabulary), n rows of each of `of_rows`) gives (n, ...): return
        the results for all tokens, (..., ...). `of_rows` have the leading dimensions of the logits.
        """
        lead = self.hidden.shape[:-1]
        hidden, *others = (
            each.reshape(lead.numel(), *each.shape[len(lead) :]) for each in (self.hidden, *of_rows)
        )
        size = rows_of_chunk(self.sample)

        def in_chunks(forward: Callable) -> torch.Tensor:
            def of_chunk(hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
                return function(self._of(forward, hidden), *others)

            keep: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            chunks = zip(*(each.split(size) for each in (hidden, *others)), strict=True)
            return torch.cat([checkpoint(of_chunk, *chunk, **keep) for chunk in chunks])

        with torch.autocast(**self.autocast):
            found = self.head.run(hidden, in_chunks)
        return found.unflatten(0, lead)


class _InGraph(torch.autograd.Function):
    """The logits' place in the graph. A function that takes them past `__torch_function__`, such as
    an autograd function of a library, gives their gradient: then the head runs again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, rows: _Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.new()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        with torch.enable_grad():
            hidden = ctx.rows.hidden.detach().requires_grad_()
            whole = replace(ctx.rows, hidden=hidden).whole()
        torch.autograd.backward(whole, grad)
        return hidden.grad, None


class Logits(torch.Tensor):
    """Logits (..., vocabulary) that are computed when something needs them.

    `whole()` gives an ordinary tensor."""

    rows: _Rows
    _whole: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """All logits in one ordinary tensor."""
        if self._whole is not None:
            return self._whole
        whole = self.rows.whole()
        if torch.is_grad_enabled():  # otherwise a loss can still be computed in chunks
            self._whole = whole
        return whole

    def _stand_in(self) -> torch.Tensor:
        """A tensor of the same shape, dtype and device, for functions that ask for no more."""
        return self.rows.sample.new_zeros(()).expand(self.shape)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype}, computed in chunks)"

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        options: dict[str, Any] = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "data_ptr":
            raise UsageError(
                "logits that are computed in chunks (activation_checkpointing.batch_slices) have "
                "no memory: give the kernel logits.whole()"
            )
        if name.startswith("new_") or name.endswith("_like"):
            args, options = tree_map_only(Logits, Logits._stand_in, (args, options))
        if not needs_values(func) or name == "untyped_storage":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        found = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Logits)]
        first = next(iter(args), options.get("input"))
        made: Any = NotImplemented
        if len(found) == 1 and found[0]._whole is None:
            logits = found[0]
            plain = name[2:-2] if name.startswith("__") else name
            if func is functional.cross_entropy and first is logits:
                made = _cross_entropy(logits, *args[1:], **_without(options, "input"))
            elif plain in _OF_EACH_ROW:
                made = _of_each_row(logits, func, plain, args, options)
            elif first is not logits:
                pass
            elif plain in _OVER_A_ROW:
                made = _over_a_row(logits, func, plain, args[1:], _without(options, "input"))
            elif plain == "getitem":
                made = _rows_at(logits, args[1])
            elif plain in _KEEP_ROWS:
                made = _reshaped(logits, func, args[1:], options)
            elif plain == "unbind" and args[1:] in ((), (0,)) and logits.dim() > 2:
                made = tuple(_at(logits, hidden) for hidden in logits.rows.hidden.unbind())
        if made is not NotImplemented:
            return made
        is_written = any(isinstance(each, Logits) for each in written_by(func, args, options))
        if torch.is_grad_enabled() or is_written:
            _tell(name, max(each.numel() * each.dtype.itemsize for each in found))
            with torch.enable_grad():
                found[0].whole()  # what is written to it stays
        args, options = tree_map_only(Logits, Logits.whole, (args, options))
        return func(*args, **options)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """An operation that Python did not see. Autograd has recorded it, see `_InGraph`."""
        given: Any = args, kwargs or {}
        with torch.no_grad():
            given = tree_map_only(Logits, lambda each: each.rows.whole(), given)
        return func(*given[0], **given[1])


def _without(options: dict, name: str) -> dict:
    return {key: value for key, value in options.items() if key != name}


@cache
def _tell(name: str, nbytes: int) -> None:
    logger.warning(
        "activation_checkpointing.batch_slices: %r needs the logits as a whole (%.1f GB), which "
        "are computed in chunks of tokens otherwise",
        name,
        nbytes / 1e9,
    )


def _at(logits: Logits, hidden: torch.Tensor) -> Logits:
    return replace(logits.rows, hidden=hidden).logits()


def _of_each_row(logits: Logits, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    if name in _TAKE_A_DIM:
        if (bound := _of_last_dim(logits, args[1:], kwargs)) is None:
            return NotImplemented
        args, kwargs = (logits, *bound[0]), bound[1]

    def operand(tensor: torch.Tensor) -> torch.Tensor:
        # One value, or one for each word, which (n, vocabulary) can be multiplied by.
        return tensor if tensor.dim() == 0 else tensor.reshape(tensor.shape[-1:])

    others = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if any(each is not logits and each.shape[:-1].numel() != 1 for each in others):
        return NotImplemented

    def step(chunk: torch.Tensor) -> torch.Tensor:
        def given(tensor: torch.Tensor) -> torch.Tensor:
            return chunk if tensor is logits else operand(tensor)

        own_args, own_kwargs = tree_map_only(torch.Tensor, given, (args, kwargs))
        return func(*own_args, **own_kwargs)

    rows = logits.rows
    with torch.no_grad():
        sample = step(rows.sample)
    if sample.shape != rows.sample.shape or sample.device != rows.sample.device:
        return NotImplemented
    hidden = rows.hidden.detach() if name == "detach" else rows.hidden
    return replace(rows, hidden=hidden, steps=(*rows.steps, step), sample=sample).logits()


def _of_last_dim(logits: Logits, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The arguments after the logits, with -1 for the dimension; None if it is not the last one."""
    dim = args[0] if args else kwargs.get("dim")
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    if dim not in (-1, logits.dim() - 1) or isinstance(dim, bool):
        return None
    return args[1:], {**_without(kwargs, "input"), "dim": -1}


def _over_a_row(logits: Logits, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    if (bound := _of_last_dim(logits, args, kwargs)) is None:
        return NotImplemented
    rest, options = bound
    if name != "gather":
        if rest:
            options["keepdim"], *rest = rest
        return NotImplemented if rest else logits.rows.reduced(partial(func, **options))
    index = options.pop("index", rest[0] if rest else None)
    if index is None or index.shape[:-1] != logits.shape[:-1]:
        return NotImplemented
    return logits.rows.reduced(lambda chunk, index: func(chunk, index=index, **options), index)


def _rows_at(logits: Logits, index: Any) -> Any:
    """`logits[index]`, if all words of the tokens are taken."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None for part in parts):
        return NotImplemented
    takes = [part.dim() if _is_mask(part) else 1 for part in parts if part is not ...]
    if sum(takes) > logits.dim():
        return NotImplemented
    ends_open = any(part is ... for part in parts[:-1]) or sum(takes) == logits.dim()
    if ends_open and not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
        return NotImplemented
    hidden = logits.rows.hidden[index]
    return _at(logits, hidden) if hidden.dim() >= 2 else NotImplemented


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def _reshaped(logits: Logits, func: Callable, args: tuple, kwargs: dict) -> Any:
    shape = func(logits._stand_in(), *args, **kwargs).shape
    if len(shape) < 2 or shape[-1] != logits.shape[-1]:
        return NotImplemented
    hidden = logits.rows.hidden
    return _at(logits, hidden.reshape(*shape[:-1], hidden.shape[-1]))


def _cross_entropy(logits: Logits, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(functional.cross_entropy).bind(logits, *args, **kwargs)
    bound.apply_defaults()
    _, target, weight, average, ignored, reduces, reduction, smoothing = bound.arguments.values()
    is_plain = logits.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    if not is_plain or average is not None or reduces is not None:
        return NotImplemented
    if weight is not None and smoothing and reduction == "mean":
        return NotImplemented
    dtype = functional.cross_entropy(logits.rows.sample, target[:0], reduction="sum").dtype
    options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": "none"}

    def of_chunk(chunk: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        chunk = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        scale = None if weight is None else weight.to(chunk.dtype)
        return functional.cross_entropy(chunk, target, scale, **options)

    losses = logits.rows.reduced(of_chunk, target)
    if reduction == "none":
        return losses.to(dtype)
    if reduction == "sum":
        return losses.sum().to(dtype)
    valid = target != ignored
    count = valid.sum() if weight is None else weight[target[valid]].sum()
    return (losses.sum() / count).to(dtype)
