"""What is known to compute each example of a batch by itself, and to do nothing else.

No test can prove that of a script's own code: what depends on the batch may need a rare token, a
later step or a backward to show, and a value that is kept for later may be kept anywhere. Code of
the packages below is known. It runs in slices of a batch, and again after a failure."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm

_PACKAGES = (
    "torch.",
    "transformers.",
    "peft.",
    "bitsandbytes.",
    "accelerate.",
    "liger_kernel.",
    "zero.",
)
_GENERATED = ("torch.fx.", "torch.jit.")  # classes whose code is a script's
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)


def why_not_known(model: nn.Module) -> str:
    """Say what runs in a forward or backward of `model` that is not known; empty if nothing."""
    for name, module in model.named_modules():
        if why := _why_no_module(module):
            return f"{f'module {name!r}' if name else 'the model'} {why}"
    with torch._C.DisableTorchFunctionSubclass():  # sharded parameters look at each access
        for name, param in model.named_parameters():
            hooks = param._backward_hooks, param._post_accumulate_grad_hooks
            if any(not _is_known(hook) for each in hooks for hook in (each or {}).values()):
                return f"parameter {name!r} has a hook of the script"
    return why_hooked(model, with_own=True)


def why_not_sliced(block: nn.Module) -> str:
    """Say why the batch of `block` is not known to be its tensors' first dimension, and all that
    its examples share to be weights; empty if it is. Hooks may come later: see `why_hooked`.
    """
    names = iter(inspect.signature(type(block).forward).parameters)
    if not type(block).__module__.startswith("transformers.") or [*names][1:2] != ["hidden_states"]:
        return f"is a {type(block).__name__}, which is none of transformers' blocks"
    for name, module in block.named_modules():
        if why := _why_no_module(module):
            return f"contains {name!r}, which {why}" if name else why
    return ""


def why_hooked(module: nn.Module, with_own: bool = False) -> str:
    """Say which hook of a script runs inside of `module`, or, with `with_own`, on it."""
    if any(not all(map(_is_known, hooks.values())) for hooks in _GLOBAL_HOOKS):
        return "a hook of the script is registered for all modules"
    for name, child in module.named_modules():
        if child is module and not with_own:
            continue
        for kind in _HOOKS:
            hooks = getattr(child, kind)
            if hooks and not all(map(_is_known, hooks.values())):
                return f"a hook of the script is on {name or type(child).__name__!r}"
    return ""


def _why_no_module(module: nn.Module) -> str:
    kind = type(module)
    if not (_is_known(kind) and _is_known(kind.forward)):
        return f"is a {kind.__name__}, whose forward is not transformers' own"
    if isinstance(module, _BatchNorm):
        return f"is a {kind.__name__}, which normalizes over the batch"
    if getattr(module, "max_norm", None) is not None:
        return f"is an {kind.__name__} with max_norm, which writes to its weight"
    if hasattr(module, "expert_capacity"):
        return f"is a {kind.__name__}, whose experts have a capacity"
    # A script may replace a method, the loss function or the attention.
    for name, value in {**vars(module), "attention": _attention_of(module)}.items():
        if callable(value) and not _is_known(value):
            return f"is a {kind.__name__} with {name!r} of the script"
    return ""


def _attention_of(module: nn.Module) -> Callable | None:
    """The function that computes the attention of one of transformers' modules."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name is None:
        return None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS.get(name)


def _is_known(code: Any) -> bool:
    """Whether a class, a function or an object that is called comes from one of the packages."""
    while isinstance(code, partial):
        code = code.func
    if isinstance(code, MethodType):
        code = code.__func__
    name = getattr(code, "__module__", None) or type(code).__module__
    is_standard = name.partition(".")[0] in sys.stdlib_module_names
    return is_standard or (name.startswith(_PACKAGES) and not name.startswith(_GENERATED))
