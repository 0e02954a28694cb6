"""Marks leaf modules, whose parameters are always gathered together. The functions are DeepSpeed's.

If the forward of a module chooses among its children, as a mixture of experts does, and ranks may
choose differently, mark the module as a leaf, because all ranks must take part in each all-gather.
Transformer blocks are gathered as a whole anyway, so you need leaves only outside of them, and in
models that do not name their blocks. Call these functions before `initialize`.

A leaf is a module with the attribute `zero.core.layout.LEAF_FLAG`. This file knows nothing else of
how groups are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from zero.config import LeafModuleConfig
from zero.core.layout import LEAF_FLAG
from zero.errors import UsageError


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all instances of these classes, or of classes with these names, as leaves.

    Returns the marked modules. Raises ValueError if there are none, unless `raise_if_not_found` is
    false.
    """

    def is_one(module: nn.Module) -> bool:
        own = type(module)
        names = (own.__name__, f"{own.__module__}.{own.__qualname__}")
        return any(
            kind in names if isinstance(kind, str) else isinstance(module, kind)
            for kind in leaf_module_classes
        )

    found = [module for module in model.modules() if is_one(module)]
    if not found and raise_if_not_found:
        _refuse("of class", leaf_module_classes)
    for module in found:
        setattr(module, LEAF_FLAG, True)
    return found


def mark_configured(model: nn.Module, leaves: LeafModuleConfig | None) -> None:
    """Mark the modules that `zero_optimization.leaf_module` names, by class, name or suffix of the
    name.

    Raises ValueError for one that is not there.
    """
    if leaves is None:
        return
    if leaves.classes:
        set_z3_leaf_modules(model, leaves.classes)
    _mark_named(model, leaves.names, str.__eq__, "named")
    _mark_named(model, leaves.name_suffixes, str.endswith, "whose name ends in")


def _mark_named(
    model: nn.Module, wanted: Sequence[str], matches: Callable[[str, str], bool], what: str
) -> None:
    missing = set(wanted)
    for name, module in model.named_modules():
        if found := [each for each in wanted if matches(name, each)]:
            setattr(module, LEAF_FLAG, True)
            missing.difference_update(found)
    if missing:
        _refuse(what, [each for each in wanted if each in missing])


def _refuse(what: str, missing: Sequence[object]) -> None:
    raise UsageError(f"leaf modules: the model has no module {what} {', '.join(map(str, missing))}")
