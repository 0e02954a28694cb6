"""One forward and backward of fake tensors, which take no room: bytes besides parameters, and
operations.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zero.core.activation_offload import HostActivations
from zero.errors import UsageError

# Of a model and all that is computed with it.
FAKE = FakeTensorMode()

_aten = torch.ops.aten
# Torch's formulas, and those that it lacks: fused attention on CPUs, where a causal mask saves
# nothing, and experts.
_FORMULAS = flop_registry | {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: (
        4 * q.numel() * k.shape[-2]
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, *_, **__: (
        10 * q.numel() * k.shape[-2]
    ),
    _aten._grouped_mm: lambda a, b, *_, **__: 2 * a.numel() * b.shape[-1],
}


def operations(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Floating-point operations of one call: matrix products count, all others are 0."""
    formula = _FORMULAS.get(getattr(func, "overloadpacket", func))
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)


class Moment(NamedTuple):
    """A call of a hook. Gradients of parameters are counted in neither number.

    kind: "enter" or "leave" (a module, in forward), "backward" (of a module's output begins),
    "gradient" (of a parameter is complete), "end". live: bytes now; peak: most bytes since the
    moment before."""

    kind: str
    what: nn.Module | nn.Parameter | None
    live: int
    peak: int


class Trace(NamedTuple):
    """Of one micro-batch.

    `operations`: floating-point ones. saved: bytes of activations in host memory.
    """

    moments: tuple[Moment, ...]
    operations: int
    saved: int


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, until they are freed.

    `operations`: of them all so far.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self._known = {
            tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())
        }
        self.live = self.peak = self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = _called(func, args, kwargs or {})
        self.operations += operations(func, args, kwargs or {}, out)
        for leaf in tree_leaves(out):
            if (
                isinstance(leaf, torch.Tensor)
                and (key := leaf.untyped_storage()._cdata) not in self._known
            ):
                storage = leaf.untyped_storage()
                self._known.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        return out

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def _called(func: Any, args: tuple, kwargs: dict) -> Any:
    """What `func` gives.

    Torch's fake product of experts takes bf16 alone, its real ones take any dtype.
    """
    if (
        getattr(func, "overloadpacket", None) is not _aten._grouped_mm
        or args[0].dtype == torch.bfloat16
    ):
        return func(*args, **kwargs)
    return func(*(each.bfloat16() for each in args[:2]), *args[2:], **kwargs).to(args[0].dtype)


class _Away:
    """What autograd has saved and is in host memory, so that it is not counted until it is back on
    the device.
    """

    def __init__(self, region: torch.Tensor):
        self._values = None
        self._shape = region.shape
        self._dtype = region.dtype

    def back(self) -> torch.Tensor:
        if self._values is None:
            self._values = torch.empty(self._shape, dtype=self._dtype)
        return self._values


def enable_checkpointing(model: nn.Module) -> None:
    """Gradient checkpointing of a transformers model, of fake tensors or real ones without dropout."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # transformers 5.23 has a new name, earlier releases do not
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


@functools.cache
def trace(
    model: nn.Module, batch: int, length: int, checkpointing: bool, on_host: bool = False
) -> Trace:
    """Run one forward with loss on `batch` sequences of `length` tokens, and as many labels, and
    its backward.

    on_host: what autograd saves goes to host memory (`cpu_checkpointing`).
    Raises UsageError for a model that needs other inputs, or has no loss.
    """
    _require_tokens(model, length)
    if checkpointing:
        enable_checkpointing(model)
    weights = [SimpleNamespace(full=param) for param in model.parameters()]
    host = HostActivations(torch.device("cpu"), weights, _Away)
    try:
        with FAKE, _Live(model) as memory, _recorded(model, memory) as moments:
            ids = torch.zeros(batch, length, dtype=torch.long)
            labels = (
                ids[:, 0] if type(model).__name__.endswith("ForSequenceClassification") else ids
            )
            with host.context() if on_host else nullcontext():
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            del loss
    except Exception as error:  # of any kind: the forward is somebody else's
        why = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{type(model).__name__} does not train on token ids and labels ({why}): {_REMEDY}"
        ) from error
    finally:
        if checkpointing:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_disable()
    return Trace(tuple(moments), memory.operations, host.moved_bytes)


_REMEDY = "leave --batch and --seq out, then activations are not counted"


def _require_tokens(model: nn.Module, length: int) -> None:
    name = type(model).__name__
    if model.main_input_name != "input_ids":
        raise UsageError(f"{name} takes {model.main_input_name}, not token ids: {_REMEDY}")
    if "labels" not in inspect.signature(model.forward).parameters:
        raise UsageError(
            f"{name} has no loss: name a class with a head in architectures of config.json, or "
            f"{_REMEDY}"
        )
    positions = getattr(model.config, "max_position_embeddings", None) or length
    if length > positions:
        raise UsageError(
            f"--seq {length}: the model's configuration has max_position_embeddings {positions}"
        )


@contextmanager
def _recorded(model: nn.Module, memory: _Live) -> Iterator[list[Moment]]:
    """Record the moments of one forward and backward."""
    moments: list[Moment] = []

    def record(kind: str, what: nn.Module | nn.Parameter | None) -> None:
        moments.append(Moment(kind, what, memory.live, memory.peak))
        memory.peak = memory.live

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a block is computed again
        record("leave", module)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda grads: record("backward", module))
                break

    def enter(module: nn.Module, args: tuple) -> None:
        if torch._C._current_graph_task_id() == -1:
            record("enter", module)

    def collect(param: nn.Parameter) -> None:
        param.grad = None
        record("gradient", param)

    handles = [module.register_forward_pre_hook(enter) for module in model.modules()]
    handles += [module.register_forward_hook(leave) for module in model.modules()]
    handles += [
        p.register_post_accumulate_grad_hook(collect) for p in model.parameters() if p.requires_grad
    ]
    try:
        yield moments
        record("end", None)
    finally:
        for handle in handles:
            handle.remove()
