"""Weights for an inference engine, in bounded memory.

`stream_weights` gives them to every rank one by one. `GatheredWhenRead` lets code that was written
for a whole model read them itself, with adapters merged.

Adapters are PEFT's, recognised by their interface, so PEFT is not imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from zero.checkpoint.export import Weights
from zero.core.param_group import ParamGroup, owning_group, unsharded
from zero.core.quantized_weights import is_quantized, public_attributes
from zero.core.sharded_param import ReadHook, ShardedParameter, show
from zero.engine import ZeroEngine
from zero.errors import UsageError


def stream_weights(
    engine: ZeroEngine, dtype: torch.dtype | None = None, max_bytes: int = 1 << 30
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights one by one, as (name, tensor on the compute device). While one is in use,
    the next ones are gathered.

    All ranks must iterate at the same time, and stop at the same weight. A tensor is valid until
    you request the next one, and must not be changed. Tied weights come once, under their first
    name. Persistent buffers come last. To merge adapters, read the model in `GatheredWhenRead`.

    Args:
        dtype: the dtype of floating-point weights. Default: the one they are trained in.
        max_bytes: the size of the two buffers together. They take more if a single weight is
            larger than half of it.

    Raises:
        ValueError: if weights change before all are read.
    """
    weights = Weights(engine.module, engine.groups, engine.comm, dtype, by_parameter=True)
    yield from weights.stream(max_bytes)


# -- PEFT's merge


def _is_merging(module: nn.Module) -> bool:
    # A wrapper of PEFT has its inner module's attributes, but not in its class.
    return hasattr(type(module), "get_base_layer")


def _merging_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _is_merging(module)]


@contextmanager
def _merge_undone(layer: Any) -> Iterator[None]:
    """Context for a `layer.merge()` that the layer does not remember afterwards."""
    before, caches = list(layer.merged_adapters), dict(getattr(layer, "_caches", {}))
    try:
        yield
    finally:
        layer.merged_adapters = before
        if hasattr(layer, "_caches"):
            layer._caches = caches


# -- a model that is read block by block


class GatheredWhenRead:
    """Context in which each block of a sharded model is gathered when one of its parameters is
    read, and resharded when a parameter of another block is.

    Every rank must read the same parameters in the same order, because a read is a collective.
    If only some ranks read, use `GatheredParameters`.

    Inside, PEFT's `merge_adapter()` and `unmerge_adapter()` gather nothing: the layers remember
    what is to be merged, and PEFT merges it into each block when the block is gathered. Anything
    written to the parameters is lost on exit.

    Args:
        model: the model, all of whose sharded parameters are covered.
        shapes_only: whether you need only names, shapes and dtypes. Nothing is gathered then, and
            the parameters' data has no values.

    Raises:
        ValueError: if a merge of the model's adapters would change more than sharded weights.
    """

    def __init__(self, model: nn.Module, shapes_only: bool = False):
        if not shapes_only and (layer := _not_served(model)) is not None:
            raise UsageError(
                f"GatheredWhenRead: a merge of the adapter of {layer!r} changes weights that are "
                "not sharded, or replaces parameters, so it cannot be put off until a read: merge "
                "in zero.GatheredParameters(model.parameters()), which gathers the whole model"
            )
        self._shapes_only = shapes_only
        groups = {owning_group(p): None for p in model.parameters() if _is_sharded(p)}
        self._groups = [group for group in groups if group is not None]
        # The layers whose merges are deferred, and the group that holds their base weights.
        self._layers: dict[Any, ParamGroup | None] = {
            layer: next(iter(_sharded_base(layer)), None)
            for layer in _merging_layers(model)
            if shapes_only or _sharded_base(layer)
        }
        self._units = _units(self._groups, list(self._layers))
        self._merges = False
        self._gathered = ExitStack()
        self._hooks: dict[ParamGroup, ReadHook | None] = {}
        self._merged_before = {layer: list(layer.merged_adapters) for layer in self._layers}

    @staticmethod
    def serves(model: nn.Module) -> bool:
        """Whether PEFT can merge the model's adapters when a block is gathered. It must change the
        values of sharded parameters, and nothing else.
        """
        return _not_served(model) is None

    def __enter__(self) -> None:
        for group in () if self._shapes_only else self._groups:
            self._hooks[group] = group.read_hook
            group.read_hook = partial(self._before_read, group)
        for layer in self._layers:
            layer.__class__ = _deferred_class(type(layer))

    def __exit__(self, *_: object) -> None:
        for layer, names in self._merged_before.items():
            layer.__class__ = type(layer).__bases__[-1]
            layer.merged_adapters = names
            vars(layer).pop("_zero_safe_merge", None)
        for group, hook in self._hooks.items():
            group.read_hook = hook
        self._gathered.close()

    def _before_read(self, group: ParamGroup, param: nn.Parameter, func: Callable) -> None:
        hook = self._hooks[group]
        if hook is not None:
            hook(param, func)  # in a forward, the engine gathers the group for itself
        if not isinstance(param, ShardedParameter):
            return
        unit = self._units[group]
        if not self._merges:  # else the unit that is merged into must stay
            self._gathered.close()
        self._gathered.enter_context(unsharded(unit))
        for layer, base_group in self._layers.items():
            if base_group in unit and layer.merged_adapters:
                self._merge(layer)

    @torch.no_grad()
    def _merge(self, layer: Any) -> None:
        """Have PEFT merge what was to be merged into the values that are shown now."""
        deferred, names = type(layer), layer.merged_adapters
        base = layer.get_base_layer()
        params, former = dict(base._parameters), _attributes(base)
        layer.__class__ = deferred.__bases__[-1]
        self._merges = True
        try:
            with _merge_undone(layer):
                layer.merged_adapters = list(self._merged_before[layer])
                new = [name for name in names if name not in layer.merged_adapters]
                layer.merge(layer._zero_safe_merge, new)
        finally:
            self._merges = False
            layer.__class__ = deferred
        for name, param in params.items():
            if (merged := base._parameters[name]) is not param:
                # PEFT has quantized the weight again, but the reader has the former object.
                base._parameters[name] = param
                show(param, merged.data)
                vars(param).update(public_attributes(merged))
        for attributes, values in former:
            self._gathered.callback(attributes.update, values)


def _attributes(base: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The attributes of a base layer that a merge changes with its quantized weight, each dict with
    a copy of it. (8-bit layers have more of them in `state`.)
    """
    owners = [base, *base._parameters.values(), getattr(base, "state", None)]
    return [
        (vars(owner), public_attributes(owner)) for owner in owners if hasattr(owner, "__dict__")
    ]


class _DeferredMerge:
    """The first base class of a layer inside `GatheredWhenRead`."""

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        names = self.active_adapters if adapter_names is None else adapter_names
        self.merged_adapters += [name for name in names if name not in self.merged_adapters]
        self._zero_safe_merge = safe_merge

    def unmerge(self: Any) -> None:
        self.merged_adapters.clear()


@cache
def _deferred_class(plain: type) -> type:
    return type(plain.__name__, (_DeferredMerge, plain), {})


def _is_sharded(param: nn.Parameter) -> bool:
    return isinstance(param, ShardedParameter)


def _sharded_base(layer: Any) -> list[ParamGroup]:
    """The groups of those parameters of a layer's base layer that are sharded."""
    found = (owning_group(p) for p in layer.get_base_layer().parameters() if _is_sharded(p))
    return [group for group in found if group is not None]


def _not_served(model: nn.Module) -> str | None:
    """The name of the first layer whose merge `GatheredWhenRead` cannot put off, or None."""
    merging = ((name, module) for name, module in model.named_modules() if _is_merging(module))
    return next((name for name, layer in merging if not _changes_sharded_only(layer)), None)


def _changes_sharded_only(layer: Any) -> bool:
    base = list(layer.get_base_layer().parameters())
    if not any(map(_is_sharded, base)):
        return True  # it is merged immediately
    if isinstance(layer.get_base_layer(), nn.MultiheadAttention):
        return False  # PEFT replaces these parameters
    if any(is_quantized(p) and not _is_of_bitsandbytes(p) for p in base):
        return False
    biases = getattr(layer, "lora_bias", None)
    only_weight = biases is not None and not any(biases.values())
    return only_weight or all(map(_is_sharded, base))


def _is_of_bitsandbytes(param: nn.Parameter) -> bool:
    """Whether PEFT merges into `param` by putting a new one in its place."""
    return hasattr(param, "quant_state") or hasattr(param, "SCB")


def _units(
    groups: Sequence[ParamGroup], layers: Sequence[Any]
) -> dict[ParamGroup, tuple[ParamGroup, ...]]:
    """The groups that are gathered together, by each of them: those of a block, and those that a
    merge needs.
    """
    units: dict[ParamGroup, tuple[ParamGroup, ...]] = {group: (group,) for group in groups}

    def join(together: Iterable[ParamGroup | None]) -> None:
        joined = tuple({group: None for part in together if part in units for group in units[part]})
        units.update(dict.fromkeys(joined, joined))

    of_modules: dict[object, list[ParamGroup]] = {}
    for group in groups:
        of_modules.setdefault(tuple(group.modules) or group, []).append(group)
    for together in of_modules.values():
        join(together)
    for layer in layers:
        join(owning_group(param) for param in layer.parameters())
    return units
