"""Blocks that run a large batch in slices: the key `activation_checkpointing.batch_slices`.

Each block is given the whole batch and runs it slice by slice. Only the input of each slice is
kept, and backward recomputes the rest. A block is therefore gathered only twice in a step and its
gradient reduced once, whatever the number of slices, and activations take the memory of one slice.
Micro-batches, in contrast, would each gather every block again. (RoundPipe, arXiv 2604.27085, and
GreedySnake, arXiv 2512.17570, order their loops in this way.)

The slices are ordinary operations of a single graph: `torch.utils.checkpoint` recomputes each with
its own random state, and autograd sums their gradients in fp32 before it passes them to the
parameters. Only blocks of transformers without a script's hooks inside are known to give the same
results and gradients then (`zero/slicing/known.py`); for any other block, the script has to say so
(`trust_slices`). `zero/slicing/probe.py` looks at the values of either."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import cache, partial
from operator import is_not
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from zero.device import is_accelerator
from zero.errors import UsageError
from zero.slicing.known import why_hooked, why_not_sliced
from zero.slicing.probe import REMEDY, BlockProbe, kept_values

logger = logging.getLogger("zero")

# With "auto", a slice has at most this many tokens: enough for large matrix products.
TOKENS = 8192
_PROMISE = (
    "if the outputs and gradients of each example depend on this example and the weights alone, "
    "and the block keeps and writes nothing, set activation_checkpointing.trust_slices to true; or"
)
# transformers' module that collects the outputs of modules inside blocks.
RECORDER = "transformers.utils.output_capturing"


Agree = Callable[[int, int, bool], tuple[int, int, bool]]


class SlicedBlock:
    """Replaces the forward of one block, and runs its batch in slices while gradients are recorded.

    Args:
        module: the block. Its inputs and outputs are tensors, in any nesting of tuples, lists and
            dicts. The first tensor of two or more dimensions says how large the batch is.
        name: the block's name, for messages.
        slices: the number of slices, or "auto".
        is_trusted: the script promises what else is required of the block's code: each example
            depends on itself alone, in backward too, and nothing but what is returned is kept.
        of: how many blocks keep their inputs on the device: this one warns in its first call if
            they will not fit. 0: it does not.
        agree: for a block in which ranks wait for each other: given the wanted number of slices,
            the size of the batch and whether values are examined, it returns the largest number
            and the smallest size of all ranks, and whether one examines.

    Attributes:
        least: the least number of slices.
        samples, number: in the last call, how large the batch was, and the number of slices.

    Raises UsageError if the block is neither known nor trusted. The forward raises it if the block
    cannot run in slices.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        slices: int | Literal["auto"],
        is_trusted: bool = False,
        of: int = 0,
        agree: Agree | None = None,
    ):
        why = why_not_sliced(module)
        if why and not is_trusted:
            raise UsageError(f"block {name!r} {why}: {_PROMISE} {REMEDY}")
        self.module: Any = module
        self._is_known, self._is_trusted = not why, is_trusted
        self._probe = BlockProbe(module, name)
        self._slices = slices
        self.least = self.number = self.samples = 1
        self._of = of
        self._agree = agree
        self._calls = 0
        # For each kind of input seen so far, which outputs have the batch as their first
        # dimension. This cannot be told from a slice of a single example.
        self._batched: dict[tuple, list[bool]] = {}
        self._forward: Callable[..., Any] = module.forward
        module.forward = self
        self._was_checkpointed = False
        self._summed = sum_in_fp32(module)

    def remove(self) -> None:
        """Restore the block's own forward and its other attributes."""
        del self.module.forward
        if self._was_checkpointed:
            self.module.gradient_checkpointing = True
        sum_in_own_dtype(self._summed)

    def compile(self, **options: Any) -> None:
        """Compile the block's own forward; `options` are those of `torch.compile`."""
        self._forward = torch.compile(self._forward, **options)

    def __deepcopy__(self, memo: dict) -> Callable:
        """A copy of the block is an ordinary module."""
        return MethodType(type(self.module).forward, memo[id(self.module)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and not (self.module.training and _is_reentrant()):
            return self._forward(*args, **kwargs)
        if not self._is_trusted and (why := why_hooked(self.module)):
            self._probe.refuse(f"cannot run its batch in slices: {why}")
        flat, spec = tree_flatten((args, kwargs))
        leaves: list[Any] = [None if _is_empty_cache(leaf) else leaf for leaf in flat]
        self._probe.refuse_objects(leaves)
        batch, tokens = _batch_of(leaves, least_dims=3 if self._is_known else 2)
        # Of a script's argument nothing tells whether these are numbers of examples or positions.
        given = [] if self._is_known else [*args, *kwargs.values()]
        if any(_has_lengths(each, batch) for each in given):
            self._probe.refuse(
                f"is given one dimension of {batch} values, which may belong to its {batch} "
                "examples: pass a tensor with a second dimension"
            )
        wanted = -(-batch * tokens // TOKENS) if isinstance(self._slices, str) else self._slices
        wanted = max(wanted, self.least)
        of_batch = [_has_batch(leaf, batch) for leaf in leaves]
        kind = (spec, *(_kind(leaf, batch) for leaf in leaves))
        # Again in calls 2, 4, 8...: a branch that starts at zero hides its values at first.
        checks = kind not in self._batched or self._calls & (self._calls + 1) == 0
        least = batch
        if self._agree is not None:
            wanted, least, checks = self._agree(wanted, batch, checks)
        self.samples, self.number = batch, (number := min(wanted, least))
        if batch == 1 < wanted:
            _warn_of_one_example()
        if number < 2:
            return checkpoint(self._run, spec, *leaves, use_reentrant=False)
        self._calls += 1
        if self._calls == 1 and self._of:
            _warn_of_inputs(leaves, of_batch, self._of)
        if checks:
            # A fresh context: transformers' recorders of outputs do not see these calls.
            run = partial(self._run, spec)
            self._batched[kind] = Context().run(self._probe.compare, run, leaves, of_batch)
        columns = [
            leaf.tensor_split(number) if sliced else [leaf] * number
            for leaf, sliced in zip(leaves, of_batch, strict=True)
        ]
        collected = _collected()
        before = {key: len(values) for key, values in collected.items()}
        outputs, places, kept, out_spec = [], [], [], spec
        for part in zip(*columns, strict=True):
            result = checkpoint(self._run, spec, *part, use_reentrant=False)
            output, out_spec = tree_flatten(result)
            outputs.append(output)
            # An input that is returned unchanged (T5's position bias) is the whole input again.
            known = {id(leaf): i for i, leaf in enumerate(part) if isinstance(leaf, torch.Tensor)}
            places.append([known.get(id(value)) for value in output])
            if checks:
                kept.append(kept_values(self.module))
        if checks:
            self._probe.refuse_kept(kept[0], kept[-1])
        for key, values in collected.items():
            found = values[before[key] :]
            each = len(found) // number
            values[before[key] :] = [torch.cat(found[i::each]) for i in range(each)]
        joined = []
        for values, found, batched in zip(
            zip(*outputs, strict=True), zip(*places, strict=True), self._batched[kind], strict=True
        ):
            if found[0] is not None and len(set(found)) == 1:
                joined.append(leaves[found[0]])
            elif batched:
                joined.append(torch.cat(values))
            else:
                # Such as a loss of each slice. (T5's position bias is the same for all.)
                if checks:
                    self._probe.refuse_different(values[0], values[-1])
                joined.append(values[0])
        return tree_unflatten(joined, out_spec)

    def _run(self, spec: TreeSpec, *leaves: Any) -> Any:
        # The block's own checkpoint would recompute every slice a second time. A script may turn it
        # on between a forward and its backward, as TRL's DPO does.
        if getattr(self.module, "gradient_checkpointing", False):
            self.module.gradient_checkpointing = False
            self._was_checkpointed = True
        args, kwargs = tree_unflatten(list(leaves), spec)
        output = self._forward(*args, **kwargs)
        if not self._is_known:
            # The lists and dicts are those of this slice: what is written to them is lost.
            after, spec_after = tree_flatten((args, kwargs))
            if spec_after != spec or any(map(is_not, after, leaves)):
                self._probe.refuse("changes a list or dict that it is given")
        return output


def sum_in_fp32(module: nn.Module) -> list[Any]:
    """Have autograd sum the gradients of the module's parts in fp32, because in 16 bits each
    addition would round. Returns the parameters. (Nothing changes with torch 2.9 and older.)
    """
    params: list[Any] = [param for param in module.parameters() if param.requires_grad]
    params = params if hasattr(torch.Tensor, "grad_dtype") else []
    for param in params:
        param.grad_dtype = torch.float32
    return params


def sum_in_own_dtype(params: Sequence[Any]) -> None:
    """Undo `sum_in_fp32`."""
    for param in params:
        grad, param.grad = param.grad, None
        param.grad_dtype = param.dtype
        param.grad = None if grad is None else grad.to(param.dtype)


def _batch_of(leaves: Sequence[Any], least_dims: int) -> tuple[int, int]:
    """Return the size of the batch and the number of tokens in each example. Tokens of packed
    sequences, with fewer dimensions than `least_dims`, are one example.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2:
            if leaf.dim() < least_dims:
                return 1, len(leaf)
            return leaf.shape[0], leaf.shape[1] if leaf.dim() > 2 else 1
    return 1, 1


def _collected() -> dict[str, list[torch.Tensor]]:
    """What transformers collects from modules inside of blocks in this forward, such as router
    logits, by kind.
    """
    module: Any = sys.modules.get(RECORDER)
    found = module and module._active_collector.get()
    return {key: values for key, values in (found or {}).items() if isinstance(values, list)}


def _warn_of_inputs(leaves: Sequence[Any], of_batch: Sequence[bool], blocks: int) -> None:
    """Say it before the step fails if the inputs of all blocks will not fit on the device."""
    kept = [leaf for leaf, is_kept in zip(leaves, of_batch, strict=True) if is_kept]
    # Positions and masks are the same for all blocks.
    kept = [leaf for leaf in kept if leaf.requires_grad and is_accelerator(leaf.device)]
    measures = hasattr(torch.accelerator, "get_memory_info")  # not with torch 2.8
    if not kept or kept[0].device.type == "meta" or not measures:  # `zero estimate` is on meta
        return
    needed, device = blocks * sum(leaf.nbytes for leaf in kept), kept[0].device
    free = torch.accelerator.get_memory_info(device)[0] + torch.accelerator.memory_reserved(device)
    free -= torch.accelerator.memory_allocated(device)
    if needed > free:
        logger.warning(
            "activation_checkpointing.batch_slices: the inputs of %d blocks will take %.1f GB, and "
            "%.1f GB are free on %s: set activation_checkpointing.cpu_checkpointing to true",
            blocks, needed / 1e9, free / 1e9, device,
        )  # fmt: skip


@cache
def _warn_of_one_example() -> None:
    logger.warning(
        "activation_checkpointing.batch_slices: a batch of one example, such as one of packed "
        "sequences, runs as a whole: raise per_device_train_batch_size"
    )


def _is_empty_cache(leaf: Any) -> bool:
    """A cache of keys and values that a model has made for training. Nothing reads it."""
    length = getattr(leaf, "get_seq_length", None)
    return length is not None and length() == 0


def _has_batch(leaf: Any, batch: int) -> bool:
    # Tensors of one dimension are positions.
    return isinstance(leaf, torch.Tensor) and leaf.dim() >= 2 and leaf.shape[0] == batch


def _has_lengths(argument: Any, batch: int) -> bool:
    """Whether something in the argument has one value for each example."""

    def is_one(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.shape == (batch,) and batch > 1
        is_list = isinstance(value, (list, tuple)) and len(value) == batch > 1
        return is_list and not any(isinstance(each, torch.Tensor) for each in value)

    return any(map(is_one, tree_leaves(argument, is_leaf=is_one)))


def _kind(leaf: Any, batch: int) -> Any:
    """Return what must agree for two inputs to be sliced in the same way."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), _has_batch(leaf, batch)
    return leaf if isinstance(leaf, (bool, str)) else type(leaf)


def _is_reentrant() -> bool:
    """Whether this is the forward of a reentrant checkpoint. It records no gradients; but backward
    runs it again with gradients, where the masks of dropout must be the same.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None
