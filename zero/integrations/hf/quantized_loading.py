"""Shards a quantized model while transformers loads it, so that no rank ever holds all of it.

transformers does not build quantized models under `deepspeed.zero.Init`. It builds them on the meta
device, and its loader then assigns one complete parameter or buffer after another, in the order of
their names. torch calls a hook before each assignment, and this hook shards the tensor, together
with the scales and codebooks that decode it. Experts that transformers leaves in 16 bits are
quantized first. Nothing is patched.

[Note: reads before zero.initialize] A script may do anything with a loaded model: cast its norms,
generate, resize its embeddings, save it. At this point there are no engine hooks that could gather
its parameters. Reading a sharded tensor therefore gathers its group, and the most recently read
groups stay unsharded. A group is sharded again once others have been read, or in `zero.initialize`.
It then keeps the values that the script has written to it, and is built from scratch if the script
has replaced its data. All ranks must run such code in the same way.
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

from zero.core.param_group import ParamGroup, State, owning_group
from zero.core.quantized_weights import is_quantized, wraps_tensors
from zero.core.sharded_param import set_owner
from zero.init import Init
from zero.integrations.hf.quantized_experts import quantized, quantizes

# The number of groups that stay unsharded after a read. A function reads a few parameters at once,
# at most six in torch's own modules (multi-head attention).
KEPT_AFTER_READS = 8


def _stage3_config() -> dict[str, Any] | None:
    """Return the configuration of the live `HfDeepSpeedConfig`, if its stage is 3."""
    integration = sys.modules.get("transformers.integrations.deepspeed")
    if integration is None or not integration.is_deepspeed_zero3_enabled():
        return None
    return integration.deepspeed_config()


def _is_loaded(former: torch.Tensor | None, tensor: torch.Tensor, module: nn.Module) -> bool:
    """Whether a loader is about to assign the complete `tensor` to an attribute of `module`, in
    place of `former`.

    transformers marks a tensor before it replaces one on the meta device. torchao replaces the
    weight by a quantized one before transformers marks the module."""
    if owning_group(tensor) is not None or isinstance(tensor, DTensor):
        return False
    if former is not None and former.is_meta:
        return hasattr(tensor, "_is_hf_initialized")
    return is_quantized(tensor) and not hasattr(module, "_is_hf_initialized")


class _Loading:
    """Shards tensors as the loader assigns them, and gathers those that a script reads before
    `zero.initialize`.
    """

    def __init__(self) -> None:
        self._config: dict[str, Any] | None = None
        self._init: Init | None = None
        # Unsharded groups, in the order in which they were read.
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
        """Return the model that contains `module`, and the path of `module.name` in it."""
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
        self, module: nn.Module, tensors: dict[str, Any], name: str, tensor: torch.Tensor | None
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
        """Reshard everything that has been read."""
        for group in list(self._kept):
            self._shard_again_if_replaced(group)
        for group in list(self._kept):
            self._reshard(group)

    def _shard(self, module: nn.Module) -> None:
        assert self._init is not None
        if not self._init.enabled or self._init.shards_nothing:
            return
        for group in self._init.shard_loaded(module):
            group.read_hook = self._before_read

    def _before_read(self, param: nn.Parameter, func: Callable) -> None:
        """Unshard the group of `param`, and reshard the groups that were read longest ago."""
        group = owning_group(param)
        assert group is not None
        group.unshard()
        self._kept.append(group)
        for kept in self._kept[:-1]:
            self._shard_again_if_replaced(kept)
        for kept in self._kept[:-KEPT_AFTER_READS]:
            self._reshard(kept)

    def _shard_again_if_replaced(self, group: ParamGroup) -> None:
        """If a script has replaced the data of a parameter, rebuild its group, because the dtype or
        shape may have changed.
        """
        if not _is_whole(group):
            self._kept.remove(group)
        elif any(map(_is_replaced, group.params, group.views)):
            self._kept.remove(group)
            for tensor in group.index:
                set_owner(tensor, None)
            self._shard(group.modules[0])

    def _reshard(self, group: ParamGroup) -> None:
        self._kept.remove(group)
        # The script may have written to `param.data`, which torch's version counter does not see.
        group.keep_written_values()
        if group.release():
            group.reshard_but_keep_aliases()


def _is_whole(group: ParamGroup) -> bool:
    """Whether `group` is unsharded and no other group has taken over its parameters."""
    return group.state is State.UNSHARDED and all(
        owning_group(tensor) is group for tensor in group.index
    )


def _is_replaced(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether `param` shows other memory than the `view` of its group's buffer."""
    return (param.data_ptr(), param.dtype, param.shape) != (view.data_ptr(), view.dtype, view.shape)


_loading = _Loading()
# Reshards what a script has read from the models loaded so far. All ranks must call it.
settle = _loading.settle


def shard_quantized_models() -> None:
    """From now on shard every quantized model that `from_pretrained` loads at stage 3."""
    register_module_module_registration_hook(_loading.module_registered)
    register_module_parameter_registration_hook(cast(Any, _loading.parameter_registered))
    register_module_buffer_registration_hook(_loading.buffer_registered)
