"""Shards a quantized model while transformers loads it, so that no rank ever holds all of it.

transformers builds no quantized model under `deepspeed.zero.Init`. It builds it on the meta device,
and its loader assigns one complete parameter or buffer after another, in the order of their names.
torch calls a hook before each assignment: there the tensor is sharded, together with the scales and
codebooks that decode it. Experts that transformers leaves in 16 bits are quantized first. Nothing
is patched.

[Note: reads before zero.initialize] A script may do anything with a loaded model: cast its norms,
generate, resize its embeddings, save it. No hook of an engine gathers for it yet. So a read of a
sharded tensor gathers its group, and the groups read last stay unsharded. Once others have been
read, or by `zero.initialize`, a group is sharded again: with the values that the script has written
to it meanwhile, or anew if the script has given it other data. All ranks must run such code alike.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zero.core.param_group import ParamGroup, State
from zero.core.quantized_weights import is_quantized, wraps_tensors
from zero.core.sharded_param import owning_group, set_owning_group
from zero.init import Init
from zero.integrations.hf.quantized_experts import quantized, quantizes

# Groups that stay unsharded after a read. A function reads a few parameters at once: six at most
# in torch's own modules (multi-head attention).
KEPT_AFTER_READS = 8


def _stage3_config() -> dict[str, Any] | None:
    """The configuration of the `HfDeepSpeedConfig` that is alive, if it has stage 3."""
    integration = sys.modules.get("transformers.integrations.deepspeed")
    if integration is None or not integration.is_deepspeed_zero3_enabled():
        return None
    return integration.deepspeed_config()


def _is_loaded(former: torch.Tensor | None, tensor: torch.Tensor, module: nn.Module) -> bool:
    """Whether a loader is about to assign the complete `tensor` to an attribute of `module`, which
    was `former`.

    transformers marks a tensor before it puts it in the place of one on the meta device. torchao
    puts a quantized one in the place of the weight, before transformers marks the module."""
    if owning_group(tensor) is not None or isinstance(tensor, DTensor):
        return False
    if former is not None and former.is_meta:
        return hasattr(tensor, "_is_hf_initialized")
    return is_quantized(tensor) and not hasattr(module, "_is_hf_initialized")


class _Loading:
    """Shards tensors as the loader assigns them, and gathers those that are read before
    `zero.initialize`.
    """

    def __init__(self) -> None:
        self._config: dict[str, Any] | None = None
        self._init: Init | None = None
        # In the order of their reads; unsharded.
        self._kept: list[ParamGroup] = []
        # A module's parent, and its name there.
        self._parents: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )

    def module_registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """torch calls this before it assigns `module` to `parent.name`."""
        if module is not None:
            self._parents[module] = weakref.ref(parent), name

    def parameter_registered(
        self, module: nn.Module, name: str, param: nn.Parameter | None
    ) -> nn.Parameter | None:
        """torch calls this before it assigns `param`, or what this returns, to `module.name`."""
        former = module._parameters.get(name)
        if param is not None and former is not None and former.is_meta and _stage3_config():
            model, path = self._model_of(module, name)
            if _is_loaded(former, param, module) and quantizes(model, module, path, param):
                marks = vars(param)
                param = quantized(model, param)
                vars(param).update(marks)
        self._registered(module, module._parameters, name, param)
        return param

    def _model_of(self, module: nn.Module, name: str) -> tuple[nn.Module, str]:
        """The model that `module` is a part of, and the path of `module.name` there."""
        while module in self._parents:
            reference, own = self._parents[module]
            parent = reference()
            if parent is None:
                break
            module, name = parent, f"{own}.{name}"
        return module, name

    def buffer_registered(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        """torch calls this before it assigns `buffer` to `module.name`."""
        former = module._buffers.get(name)
        if former is not None and former.is_meta:
            self._registered(module, module._buffers, name, buffer)

    def _registered(
        self,
        module: nn.Module,
        tensors: dict[str, Any],
        name: str,
        tensor: torch.Tensor | None,
    ) -> None:
        config = _stage3_config()
        if config is None or tensor is None or Init.is_active():
            return
        if tensor.is_meta:
            # A quantized model is being built. Threads of transformers would read its checkpoint
            # much faster than the ranks shard one tensor after another.
            os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        elif _is_loaded(tensors.get(name), tensor, module):
            if config is not self._config:
                self._config, self._init = config, Init(config_dict_or_path=config)
            if wraps_tensors(tensor):
                # Codes cannot be trained, but a loader takes them for floating-point values.
                tensor.requires_grad_(False)
            tensors[name] = tensor  # as torch does next
            self._shard(module)

    def settle(self) -> None:
        """Shard all again that was read."""
        for group in list(self._kept):
            self._shard_again_if_replaced(group)
        for group in list(self._kept):
            self._reshard(group)

    def _shard(self, module: nn.Module) -> None:
        assert self._init is not None
        if not self._init.enabled or self._init.shards_nothing:
            return
        for group in self._init.shard_loaded(module):
            group.watch_reads(self._before_read)

    def _before_read(self, param: nn.Parameter, func: Callable) -> None:
        """Unshard the group of `param`, and shard those again that were read long ago."""
        group = owning_group(param)
        assert group is not None
        group.unshard()
        self._kept.append(group)
        for kept in self._kept[:-1]:
            self._shard_again_if_replaced(kept)
        for kept in self._kept[:-KEPT_AFTER_READS]:
            self._reshard(kept)

    def _shard_again_if_replaced(self, group: ParamGroup) -> None:
        """If a script has given a parameter other data, make groups anew: its dtype or shape may
        have changed.
        """
        if not _is_whole(group):
            self._kept.remove(group)
        elif any(map(_is_replaced, group.params, group.unsharded_values())):
            self._kept.remove(group)
            for tensor in group.index:
                set_owning_group(tensor, None)
            self._shard(group.modules[0])

    def _reshard(self, group: ParamGroup) -> None:
        self._kept.remove(group)
        # `param.data` may have been written to, which torch does not count.
        group.keep_written_values()
        if group.release():
            group.reshard_but_keep_aliases()


def _is_whole(group: ParamGroup) -> bool:
    """Whether `group` is unsharded and no other group has taken its parameters over."""
    return group.state is State.UNSHARDED and all(
        owning_group(tensor) is group for tensor in group.index
    )


def _is_replaced(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether `param` shows other memory than the `view` of its group's buffer."""
    return (param.data_ptr(), param.dtype, param.shape) != (
        view.data_ptr(),
        view.dtype,
        view.shape,
    )


_loading = _Loading()
# Shards again what a script has read of the models loaded so far; all ranks must call it.
settle = _loading.settle


def shard_quantized_models() -> None:
    """From now on shard every quantized model that `from_pretrained` loads at stage 3."""
    register_module_module_registration_hook(_loading.module_registered)
    register_module_parameter_registration_hook(cast(Any, _loading.parameter_registered))
    register_module_buffer_registration_hook(_loading.buffer_registered)
