"""A head whose logits exist only in chunks of tokens: `activation_checkpointing.batch_slices`.

With a vocabulary of 128,256 words, the logits of 65,536 tokens take 34 GB in fp32, and a loss makes
several tensors of their size. Here the head returns `Logits` instead, which know the hidden states
and what a model or script has done with the logits so far: a cast, a scale, a soft cap, a shift, a
`view`. Only what leaves one value, or a few, for each token is computed: a cross-entropy, a
`gather` of log-probabilities, a sum, a maximum. It is computed chunk by chunk, and each chunk again
in backward, unless it is the sum or mean of a cross-entropy: its gradients are known up to a factor
when it is computed. (Cut Cross-Entropy, arXiv 2411.09009, and Liger, arXiv 2410.10989, compute one
loss in this way.)

Anything else needs the logits as a whole, and gets them; to write to them is an error. Each row of
the logits must depend on the same row of the hidden states alone, so the head must consist of known
modules without dropout. From its call to the end of backward its weights stay gathered, whether a
rank has chunks or not: how many it has is its own affair, because no collective depends on it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from zero.core.param_group import ParamGroup, owning_group
from zero.core.sharded_param import ShardedParameter, cut_of, needs_values, written_by
from zero.errors import UsageError, rounded
from zero.slicing.blocks import sum_in_fp32, sum_in_own_dtype
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
# What is done to the tensor itself.
_OF_A_WHOLE = frozenset("data_ptr register_hook retain_grad".split())
_KEEP_ROWS = frozenset("view reshape flatten squeeze unsqueeze".split())


def sliced_head(
    model: nn.Module, steps: Callable[[], int], warns: bool = False
) -> SlicedHead | None:
    """Prepare the head of one of transformers' models, or of one in `model`, for chunks; None if it
    has none, or one whose logits must be a whole, which is said if it `warns`.

    `steps`: counts the steps of the optimizer, after each of which the weights are others.
    """
    if (head := _head_of(model)) is None:
        return None
    if why := _why_whole(head):
        if warns:
            logger.warning(
                "activation_checkpointing.batch_slices: the logits are whole, because the head %s: "
                "1,000 tokens take %s GB in fp32, and a loss makes several such tensors",
                why,
                rounded(4e3 * getattr(head, "out_features", 0) / 1e9),
            )
        return None
    # Each chunk calls the modules inside, such as adapters, so they must have nothing to gather.
    inner = {*head.modules()}
    for group in _groups_of(head):
        group.modules[:] = dict.fromkeys(head if each in inner else each for each in group.modules)
    return SlicedHead(head, steps)


def _head_of(model: nn.Module) -> Any:
    found = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    heads = (find() for find in found if find is not None)
    head: Any = next((each for each in heads if isinstance(each, nn.Module)), None)
    saved = getattr(head, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict) and len(saved) == 1:
        (head,) = saved.values()  # the copy that PEFT trains in place of the head
    return head if head is not None and any(True for _ in head.parameters()) else None


def _groups_of(head: nn.Module) -> set[ParamGroup]:
    return {group for param in head.parameters() if (group := owning_group(param)) is not None}


def _why_whole(head: nn.Module) -> str:
    """Say why its logits cannot be computed in chunks; empty if they can."""
    modules = {*head.modules()}
    if any(isinstance(each, nn.Dropout) and each.p for each in modules):
        return "has dropout, which draws other numbers for each chunk"
    if any(cut_of(param) is not None for param in head.parameters()):
        return "is cut by tensor parallelism"
    if any(getattr(getattr(each, "state", None), "threshold", 0) for each in modules):
        return "is quantized by LLM.int8(), which looks for outliers in all tokens"
    if any(modules.isdisjoint(each.modules) for each in _groups_of(head) if not each.persistent):
        return "is in a block, which is gathered for its own call alone"
    return why_not_known(head)


class SlicedHead:
    """Replaces the forward of a head, (..., hidden size) to (..., vocabulary).

    Attributes:
        chunks: at least so many. 0: the head computes its logits as a whole.
    """

    # The hooks hold the group of such a module until the end of backward.
    keeps_weights = True

    def __init__(self, module: nn.Module, steps: Callable[[], int]):
        self.module: Any = module
        self.steps = steps
        self.forward: Callable[..., torch.Tensor] = module.forward
        module.forward = self
        self.chunks = 0
        self._summed: list[Any] = []

    def refine(self, chunks: int) -> None:
        """Compute logits in at least so many chunks from now on."""
        self.chunks = chunks
        self._summed = self._summed or sum_in_fp32(self.module)

    def remove(self) -> None:
        """Restore the head's own forward and the dtype of its gradients."""
        del self.module.forward
        sum_in_own_dtype(self._summed)

    def __deepcopy__(self, memo: dict) -> Callable:
        """A copy of the head is an ordinary module."""
        return MethodType(type(self.module).forward, memo[id(self.module)])

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and not kwargs and self._is_sliced(hidden := args[0]):
            with torch.no_grad():
                sample = self.forward(hidden.flatten(0, -2)[:0])
            if (tokens := hidden.shape[:-1].numel()) > self.rows_of_chunk(sample, tokens):
                first = partial(_under, autocast_now(hidden.device.type), self.forward)
                of_call = hidden._version, self.steps(), self.adapters()
                return _Rows(self, hidden, (first,), sample, *of_call).logits()
        return self.forward(*args, **kwargs)

    def _is_sliced(self, hidden: torch.Tensor) -> bool:
        if not self.chunks or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        trained = any(param.requires_grad for param in self.module.parameters())
        if hidden.dim() < 2 or not (hidden.requires_grad or trained):
            return False
        # Not in a transform of torch.func, nor with another library's kernel for the loss.
        in_transform = peek_interpreter_stack() is not None
        is_torch = functional.cross_entropy.__module__ == functional.__name__
        return is_torch and not in_transform and not why_hooked(self.module, with_own=True)

    def adapters(self) -> list[str]:
        """Which of PEFT's adapters are in use, and how."""
        kept = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
        layers = (each for each in self.module.modules() if hasattr(each, kept[0]))
        return [str([getattr(each, name, None) for name in kept]) for each in layers]

    def rows_of_chunk(self, sample: torch.Tensor, tokens: int) -> int:
        """The number of tokens in a chunk of `tokens`, for logits like `sample` (any,
        vocabulary).
        """
        elements = CHUNK_ELEMENTS.get(sample.device.type, CHUNK_ELEMENTS_ELSEWHERE)
        return max(1, min(elements // max(1, sample.shape[-1]), -(-tokens // self.chunks)))


def autocast_now(device_type: str) -> Callable[[], AbstractContextManager]:
    """Return what makes contexts of the autocast that is in force now."""
    device_type = "cpu" if device_type == "meta" else device_type
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if enabled else None
    return partial(torch.autocast, device_type, dtype=dtype, enabled=enabled)


def _under(autocast: Callable[[], AbstractContextManager], function: Callable, *args: Any) -> Any:
    with autocast():
        return function(*args)


@dataclass(frozen=True, eq=False)
class _Rows:
    """How to compute the rows of some logits.

    Attributes:
        hidden: (..., hidden size), what the head is given.
        functions: the head's forward, and what is done with its result: of (n, vocabulary) for any
            n, each under the autocast of its call.
        sample: (0, vocabulary), no rows: of the dtype and on the device that the logits have.
        version: of the hidden states, step: of the optimizer, and adapters: the head's, when it
            was called.
        is_constant: the logits get no gradient.
        operands: tensors of the functions that get one.
    """

    head: SlicedHead
    hidden: torch.Tensor
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    sample: torch.Tensor
    version: int
    step: int
    adapters: list[str]
    is_constant: bool = False
    operands: tuple[torch.Tensor, ...] = ()

    def logits(self) -> Logits:
        rows = self if torch.is_grad_enabled() else replace(self, is_constant=True)
        hidden = rows.hidden.detach() if rows.is_constant else rows.hidden
        params = () if rows.is_constant else (*self.head.module.parameters(), *self.operands)
        made = _InGraph.apply(rows, hidden, *params)
        made.rows = rows
        return made

    def new(self) -> Logits:
        """The tensor, which has no memory."""
        shape = (*self.hidden.shape[:-1], self.sample.shape[-1])
        like = {"dtype": self.sample.dtype, "device": self.sample.device}
        return torch.Tensor._make_wrapper_subclass(Logits, shape, **like)

    def whole(self) -> torch.Tensor:
        """All logits, (..., vocabulary)."""
        return self._of(self.hidden)

    def _of(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.head.module.parameters()
        is_gone = any(isinstance(weight, ShardedParameter) for weight in weights)
        if is_gone or self.step != self.head.steps():
            raise UsageError(
                "these logits are computed in chunks (activation_checkpointing.batch_slices), and "
                "the weights of their step are gone: take what you need of them, or call "
                "logits.whole(), before backward"
            )
        if self.hidden._version != self.version or self.adapters != self.head.adapters():
            raise UsageError(
                "the hidden states were written to, or adapters switched, after the head had been "
                "called, and logits are computed from them (activation_checkpointing.batch_slices):"
                " write to a clone, and compute the loss and its backward before the switch"
            )
        for function in self.functions:
            hidden = function(hidden)
        return hidden.detach() if self.is_constant else hidden

    def reduced(
        self, function: Callable[..., torch.Tensor], *of_rows: torch.Tensor, is_sum: bool = False
    ) -> torch.Tensor:
        """`function`(logits (n, vocabulary), n rows of each of `of_rows`) gives (n, ...): return
        the results for all tokens, (..., ...), or their sum, for which no chunk is computed twice.
        `of_rows` have the leading dimensions of the logits.
        """
        lead = self.hidden.shape[:-1]
        given = (self.hidden, *of_rows)
        flat = [each.reshape(lead.numel(), *each.shape[len(lead) :]) for each in given]
        size = self.head.rows_of_chunk(self.sample, lead.numel())
        autocast = autocast_now(self.sample.device.type)

        def of_chunk(hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return _under(autocast, function, self._of(hidden), *others)

        chunks = zip(*(each.split(size) for each in flat), strict=True)
        trains_others = any(each.requires_grad for each in (*self.operands, *of_rows))
        is_trained = not (self.is_constant or trains_others) and torch.is_grad_enabled()
        if is_sum and is_trained:
            params = (*self.head.module.parameters(),)
            # In fp16, gradients are too small without the loss scale, which a backward brings.
            is_narrow = self.functions[0](flat[0][:0]).dtype == torch.float16
            if not is_narrow and not any(param._backward_hooks for param in params):
                return _Summed.apply(of_chunk, chunks, self.hidden, *params)
        keep: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        found = torch.cat([checkpoint(of_chunk, *chunk, **keep) for chunk in chunks])
        return found.sum() if is_sum else found.unflatten(0, lead)


class _Summed(torch.autograd.Function):
    """The sum of a function of each row. Forward computes its gradients, too, and backward
    multiplies them.
    """

    @staticmethod
    def forward(
        ctx: Any, of_chunk: Callable, chunks: Iterable[tuple], *inputs: torch.Tensor
    ) -> torch.Tensor:
        total, of_hidden = torch.zeros(()), []
        trained = [each for each in inputs[1:] if each.requires_grad]
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for hidden, *others in chunks:
            # Hooks that move saved tensors, such as those for activations, do not see this graph.
            with torch.enable_grad(), saved_tensors_hooks(lambda each: each, lambda each: each):
                leaf = hidden.detach().requires_grad_()
                value = of_chunk(leaf, *others).sum()
                found = torch.autograd.grad(value, [leaf, *trained], allow_unused=True)
            total = total.to(value).add(value.detach())
            of_hidden.append(found[0])
            part = None
            for param, part in zip(trained, found[1:], strict=True):
                if param in sums:
                    sums[param].add_(part)
                elif part is not None:
                    sums[param] = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
            del found, part  # as large as the weights
        # Not among the saved tensors, which may be moved to the host, and may not be changed.
        ctx.found = [torch.cat(of_hidden).view_as(inputs[0]), *map(sums.get, inputs[1:])]
        ctx.save_for_backward(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        _ = ctx.saved_tensors  # an error if the graph is gone
        if torch.is_grad_enabled():
            raise UsageError(
                "a loss in chunks (activation_checkpointing.batch_slices) has no second "
                "derivative: compute it from logits.whole(), or without batch_slices"
            )
        scale, found = (torch.mul if keeps_graph() else torch.Tensor.mul_), ctx.found
        ctx.found = found if keeps_graph() else None
        return None, None, *(each if each is None else scale(each, grad) for each in found)


class _InGraph(torch.autograd.Function):
    """The logits' place in the graph. A function that takes them past `__torch_function__`, such as
    an autograd function of a library, gives their gradient: then the head runs again.
    """

    @staticmethod
    def forward(ctx: Any, rows: _Rows, hidden: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.rows, ctx.params = rows, params
        return rows.new()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        with torch.enable_grad():
            hidden = ctx.rows.hidden.detach().requires_grad_()
            whole = replace(ctx.rows, hidden=hidden, version=hidden._version).whole()
        needed = [hidden, *(param for param in ctx.params if param.requires_grad)]
        found = iter(torch.autograd.grad(whole, needed, grad, allow_unused=True))
        of_hidden = next(found)
        return None, of_hidden, *(next(found) if p.requires_grad else None for p in ctx.params)


class _OfLeaf(torch.autograd.Function):
    """The whole of logits that were detached and then required a gradient, which they get."""

    @staticmethod
    def forward(ctx: Any, logits: Logits) -> torch.Tensor:
        return logits.rows.whole()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Logits(torch.Tensor):
    """Logits (..., vocabulary) that are computed when something needs them.

    `whole()` gives an ordinary tensor."""

    rows: _Rows
    _whole: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """All logits in one ordinary tensor."""
        if self._whole is not None:
            return self._whole
        if self._gets_gradient:
            with torch._C.DisableTorchFunctionSubclass():
                whole: Any = _OfLeaf.apply(self)
        else:
            whole = self.rows.whole()
        if torch.is_grad_enabled():  # otherwise a loss can still be computed in chunks
            self._whole = whole
        return whole

    @property
    def _gets_gradient(self) -> bool:
        """Whether the rows do not know its place in the graph that is being recorded: it is a leaf,
        or what another library's function has made."""
        is_apart = self.is_leaf or self.rows.is_constant
        return torch.is_grad_enabled() and self.requires_grad and is_apart

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
        writes = name == "__set__" or any(
            isinstance(each, Logits) for each in written_by(func, args, options)
        )
        if writes or name in _OF_A_WHOLE:
            raise UsageError(
                f"{'an assignment' if name == '__set__' else name}: logits that are computed in "
                "chunks (activation_checkpointing.batch_slices) have no memory of their own: use "
                "logits = logits.whole() instead"
            )
        if name.startswith("new_") or name.endswith("_like"):
            args, options = tree_map_only(Logits, Logits._stand_in, (args, options))
        if not needs_values(func) or name == "untyped_storage":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        found = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Logits)]
        first = next(iter(args), options.get("input"))
        made: Any = NotImplemented
        if len(found) == 1 and found[0]._whole is None and not found[0]._gets_gradient:
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
        if torch.is_grad_enabled():
            _tell(name, max(each.numel() * each.dtype.itemsize for each in found))
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


_told: set[str] = set()


def _tell(name: str, nbytes: int) -> None:
    if name in _told:
        return
    _told.add(name)
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
        if tensor is logits:
            return tensor
        # One value, or one for each word, which (n, vocabulary) can be multiplied by. A copy,
        # because the script may write to it.
        return (tensor if tensor.dim() == 0 else tensor.reshape(tensor.shape[-1:])).clone()

    for each in tree_leaves((args, kwargs)):
        if isinstance(each, torch.Tensor) and each is not logits:
            if each.shape[:-1].numel() != 1 or each.dim() > logits.dim():
                return NotImplemented
    args, kwargs = tree_map_only(torch.Tensor, operand, (args, kwargs))
    given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
    trained = tuple(each for each in given if each is not logits and each.requires_grad)
    autocast = autocast_now(logits.device.type)

    def step(chunk: torch.Tensor) -> torch.Tensor:
        given = tree_map_only(Logits, lambda _: chunk, (args, kwargs))
        return _under(autocast, partial(func, **given[1]), *given[0])

    rows = logits.rows
    with torch.no_grad():
        sample = step(rows.sample)
    if not isinstance(sample, torch.Tensor) or sample.shape != rows.sample.shape:
        return NotImplemented
    if sample is rows.sample and name not in ("contiguous", "detach"):
        return logits  # a cast that changes nothing gives the tensor itself
    if sample.device != rows.sample.device:
        return NotImplemented
    is_constant = rows.is_constant or name == "detach"
    made = replace(rows, functions=(*rows.functions, step), sample=sample, is_constant=is_constant)
    return replace(made, operands=(*rows.operands, *trained)).logits()


def _of_last_dim(logits: Logits, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The arguments after the logits, with -1 for the dimension; None if it is not the last one."""
    dim = args[0] if args else kwargs.get("dim")
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    if dim not in (-1, logits.dim() - 1) or isinstance(dim, bool):
        return None
    return (-1, *args[1:]), {k: v for k, v in kwargs.items() if k not in ("input", "dim")}


def _over_a_row(logits: Logits, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    if (bound := _of_last_dim(logits, args, kwargs)) is None:
        return NotImplemented
    rest, options = bound
    if name != "gather":
        return logits.rows.reduced(lambda chunk: func(chunk, *rest, **options))
    index = options.pop("index", rest[1] if len(rest) > 1 else None)
    if not isinstance(index, torch.Tensor) or index.shape[:-1] != logits.shape[:-1]:
        return NotImplemented
    return logits.rows.reduced(lambda chunk, index: func(chunk, -1, index, **options), index)


def _rows_at(logits: Logits, index: Any) -> Any:
    """`logits[index]`, if all words of the tokens are taken."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None for part in parts):
        return NotImplemented
    given = [part for part in parts if part is not ...]
    takes = [part.dim() if getattr(part, "dtype", None) == torch.bool else 1 for part in given]
    if sum(takes) > logits.dim():
        return NotImplemented
    ends_open = any(part is ... for part in parts[:-1]) or sum(takes) == logits.dim()
    if ends_open and not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
        return NotImplemented
    hidden = logits.rows.hidden[index]
    return _at(logits, hidden) if hidden.dim() >= 2 else NotImplemented


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

    if reduction == "none":
        return logits.rows.reduced(of_chunk, target).to(dtype)
    total = logits.rows.reduced(of_chunk, target, is_sum=True)
    if reduction == "sum":
        return total.to(dtype)
    valid = target != ignored
    count = valid.sum() if weight is None else weight[target[valid]].sum()
    return (total / count).to(dtype)
