"""`Init` shards a model while it is being built.

This file knows nothing about engines, hooks or optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from zero.comm import communicator as comm
from zero.comm.control import Record
from zero.config import AioConfig, OffloadConfig, load_config
from zero.config.load import Source
from zero.core.layout import GroupPlan
from zero.core.param_group import ParamGroup, owning_group
from zero.core.quantized_weights import is_quantized, quantized_tensors
from zero.core.schedule import Residency
from zero.core.sharded_param import PlaceholderView, written_by
from zero.errors import UsageError
from zero.model_checks import STRICTLY, kept_in_fp32
from zero.offload.tiers import Tier


class _InPlaceOnSharded(TorchFunctionMode):
    """Lets in-place functions act on the values of a sharded parameter instead of its placeholder.

    The same holds for its views, because many constructors write to `weight.data` or to
    `weight.data[padding_idx]`, as those of transformers before 5.0 do.
    """

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        group = next(filter(None, map(owning_group, map(_viewed, written))), None)
        if group is None:
            result = func(*args, **kwargs)
            if isinstance(result, PlaceholderView) and args and result is not args[0]:
                result.made_by = func, args, kwargs
            return result
        with group.unsharded():
            shown, named = tree_map_only(PlaceholderView, _made_again, (args, kwargs))
            func(*shown, **named)
            group.broadcast_values(src=0)
        return written[0]


def _viewed(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter of which `tensor` is a view, or `tensor` itself."""
    while isinstance(tensor, PlaceholderView) and tensor.made_by is not None:
        tensor = tensor.made_by[1][0]
    return tensor


def _made_again(view: PlaceholderView) -> object:
    """The view of what its parameter shows now."""
    if view.made_by is None:
        return view
    func, args, kwargs = view.made_by
    args, kwargs = tree_map_only(PlaceholderView, _made_again, (args, kwargs))
    return func(*args, **kwargs)


def _initializes_nothing() -> bool:
    """Whether somebody has replaced torch's initialization functions with ones that do nothing, as
    transformers does before it loads a model: plain torch then draws no random numbers.
    """
    value = torch.zeros(1, device="cpu")
    nn.init.ones_(value)
    return not value.item()


class Init:
    """Context in which every parameter is sharded as soon as the module that owns it is complete.

    A module is complete when it is assigned to its parent, so no rank holds more than its shards
    and the module under construction. All ranks get rank 0's values. Each parameter is a group of
    its own until `zero.initialize` groups them. Later weight initialization (`param.normal_()` and
    the like on a whole parameter, on its `data` or on a part of that) unshards the parameter for
    this call, so all ranks must run the same initialization.

    Args:
        module: an already built model to shard immediately (then the object need not be used as a
            context).
        config_dict_or_path: the ds_config. It decides where shards live, and is checked here,
            before anything is built.
        dtype: the dtype of the sharded parameters. None: the 16-bit dtype of the configuration, or
            otherwise the dtype they are built in.
        enabled: False makes the context do nothing.
        remote_device: "cpu", "nvme" or "none", instead of the configuration's `offload_param`.
        pin_memory: whether host memory is page-locked. None: as the configuration says.
        config: the same as `config_dict_or_path`.
        mem_efficient_linear: has no effect, because torch.nn.functional.linear saves no copy of a
            gathered weight here.

    Raises:
        ValueError: for a bad configuration, or for an argument of deepspeed.zero.Init that is not
            supported.
    """

    _active: Init | None = None

    def __init__(
        self,
        module: nn.Module | None = None,
        config_dict_or_path: Source | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        remote_device: str | None = None,
        pin_memory: bool | None = None,
        config: Source | None = None,
        mem_efficient_linear: bool = True,
        **others: object,
    ):
        if unknown := sorted(name for name, value in others.items() if value is not None):
            raise UsageError(
                f"zero.Init: not supported: {', '.join(unknown)}; leave the argument out"
            )
        source = config_dict_or_path if config_dict_or_path is not None else config
        self.enabled = enabled
        if not self.enabled:
            return
        settings = load_config({} if source is None else source, allow_auto=True)
        zero = settings.zero_optimization
        self.dtype = dtype or settings.sixteen_bit_dtype
        self.strict = zero.enable_sanity_checks
        # Which buffers `shard_loaded` takes, as `quantized_tensors` says.
        self.buffers = zero.stage3_shard_buffers
        everyone = comm.communicator()
        self.comm = everyone.within(zero.shards_over(everyone.world_size))
        aio = settings.aio if zero.offloads_params else AioConfig()
        offload = (zero.offload_param if zero.offloads_params else None) or OffloadConfig()
        overrides = {"device": remote_device, "pin_memory": pin_memory}
        given = {key: value for key, value in overrides.items() if value is not None}
        offload = offload.model_copy(update=given)
        if offload.device == "nvme" and not offload.nvme_path:
            raise UsageError(
                "zero.Init: remote_device is nvme: set offload_param.nvme_path to a folder"
            )
        self.tier = Tier.of(offload, aio, self.comm.device)
        self.residency = Residency()
        self._seen: list[weakref.ref[nn.Module]] = []
        if module is not None:
            self._shard_tree(module)

    @property
    def shards_nothing(self) -> bool:
        """Whether each parameter would stay as it is: on one rank, without offload."""
        return self.comm.shard_group.size == 1 and self.tier == Tier(self.comm.device)

    @staticmethod
    def is_active() -> bool:
        """Whether the program is inside such a context."""
        return Init._active is not None

    def __enter__(self) -> Init:
        if not self.enabled:
            return self
        if Init._active is None:
            with ExitStack() as installed:
                # Constructors may draw random numbers for weights that are replaced too.
                random = torch.random.fork_rng(devices=[], enabled=_initializes_nothing())
                installed.enter_context(random)
                installed.enter_context(_InPlaceOnSharded())
                handle = register_module_parameter_registration_hook(self._parameter_registered)
                installed.callback(handle.remove)
                handle = register_module_module_registration_hook(self._module_registered)
                installed.callback(handle.remove)
                self._installed = installed.pop_all()
            Init._active = self
        self._seen_before = len(Init._active._seen)
        return self

    def __exit__(self, exc_type: type | None, *exc_info: object) -> None:
        if not self.enabled:
            return
        outermost = Init._active
        if outermost is self:
            Init._active = None
            self._installed.close()
        if exc_type is None:
            # Parameters of modules that have no parent: the model itself.
            assert outermost is not None
            for reference in outermost._seen[self._seen_before :]:
                if (module := reference()) is not None:
                    outermost._shard_own(module)

    def _parameter_registered(
        self, module: nn.Module, name: str, param: nn.Parameter | None
    ) -> None:
        if not self._seen or self._seen[-1]() is not module:
            self._seen.append(weakref.ref(module))

    def _module_registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is None:
            return
        self._shard_tree(module)
        # Only now the class that asks for it is known. A checkpoint's values are loaded later.
        named = () if self.dtype is None else module.named_parameters(name)
        for dotted, param in kept_in_fp32([parent], named, STRICTLY).items():
            group = owning_group(param)
            if group is not None and group.dtype == self.dtype:
                self._make_group(GroupPlan(dotted, [param], [dotted]), torch.float32)

    def _shard_tree(self, root: nn.Module) -> None:
        for module in root.modules():
            self._shard_own(module)

    def _shard_own(self, module: nn.Module) -> None:
        own = self._ordinary(module)
        self._require_same(module, own)
        for name, param in own.items():
            self._make_group(GroupPlan(name, [param], [name]), self.dtype)

    def shard_loaded(self, module: nn.Module) -> list[ParamGroup]:
        """Shard the module's own tensors, quantized or not, as they are.

        Returns the groups: one for all quantized tensors, and one for each other parameter."""
        found = quantized_tensors(module, self.buffers)
        packed = {each.name: each for each in found if owning_group(each.tensor) is None}
        tensors = {name: quantized.tensor for name, quantized in packed.items()}
        named = self._ordinary(module).items()
        own = {n: param for n, param in named if n not in packed and not is_quantized(param)}
        self._require_same(module, tensors | own)
        plans = [GroupPlan(name, [param], [name], [module]) for name, param in own.items()]
        if packed:
            names, values = list(tensors), cast(list[nn.Parameter], list(tensors.values()))
            aliases = {quantized.tensor: quantized.aliases for quantized in packed.values()}
            plan = GroupPlan(names[0], values, names, [module], packed=True, aliases=aliases)
            plans.append(plan)
        return [self._make_group(plan) for plan in plans]

    def _ordinary(self, module: nn.Module) -> dict[str, nn.Parameter]:
        named = module.named_parameters(recurse=False)
        own = ((name, param) for name, param in named if owning_group(param) is None)
        return {n: p for n, p in own if p.is_floating_point() and p.numel() and not p.is_meta}

    def _require_same(self, module: nn.Module, own: Mapping[str, torch.Tensor]) -> None:
        # Another rank may have values of these.
        meta = {n: param for n, param in module.named_parameters(recurse=False) if param.is_meta}
        if own or meta:
            kind = type(module).__name__
            shapes = {name: f"{tuple(param.shape)} {param.dtype}" for name, param in own.items()}
            shapes |= dict.fromkeys(meta, "on the device meta")
            facts = {f"parameter {name} of a {kind}": shape for name, shape in shapes.items()}
            self.comm.control("building a model").require_same(lambda: Record(facts))

    def _make_group(self, plan: GroupPlan, dtype: torch.dtype | None = None) -> ParamGroup:
        place = {"tier": self.tier, "strict": self.strict}
        return ParamGroup(plan, self.comm, self.residency, dtype=dtype, **place)
