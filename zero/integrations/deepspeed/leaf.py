"""DeepSpeed's functions for leaf modules: modules that are gathered as a whole.

A module whose forward chooses among its children (a mixture of experts) must be a leaf if ranks may
choose differently, because all ranks must take part in an all-gather. Transformer blocks are whole
groups anyway. Leaves are for modules outside of them, and for models that do not name their blocks.
Call these functions before `initialize`.

A leaf is a module with the attribute `zero.core.layout.LEAF_FLAG`. This file knows nothing else of
how groups are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from zero.config import LeafModuleConfig
from zero.core.layout import LEAF_FLAG
from zero.errors import UsageError


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module itself is a leaf."""
    return getattr(model, LEAF_FLAG, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All leaf modules in `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make this module itself a leaf, or not."""
    setattr(model, LEAF_FLAG, flag)


_Matches = Callable[[str, nn.Module, Any], bool]


def _mark(
    model: nn.Module, wanted: Iterable, flag: bool, matches: _Matches
) -> tuple[list[nn.Module], list]:
    """Mark the modules that match one of `wanted`; return them, and those of `wanted` that match
    none.
    """
    named, wanted = list(model.named_modules()), list(wanted)
    found = [
        module for name, module in named if any(matches(name, module, each) for each in wanted)
    ]
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, [
        each for each in wanted if not any(matches(name, module, each) for name, module in named)
    ]


def _refuse(missing: Sequence[object], what: str) -> None:
    if missing:
        raise UsageError(
            f"leaf modules: the model has no module {what} {', '.join(map(str, missing))}"
        )


def _is_of_class(name: str, module: nn.Module, kind: type | str) -> bool:
    own = type(module)
    if isinstance(kind, str):
        return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")
    return isinstance(module, kind)


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type | str],
    raise_if_not_found: bool = True,
    flag: bool = True,
) -> list[nn.Module]:
    """Make all instances of these classes (or of classes with these names) leaves; return them.

    Raises ValueError if there are none.
    """
    found, _ = _mark(model, leaf_module_classes, flag, _is_of_class)
    _refuse(leaf_module_classes if raise_if_not_found and not found else [], "of class")
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`."""
    return set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found, flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules with these names in `model.named_modules()` leaves; return them and the
    names not found.
    """
    found, missing = _mark(model, module_names, flag, lambda name, _, wanted: name == wanted)
    _refuse(missing if raise_if_not_found else [], "named")
    return found, missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules whose names end in one of these leaves; return them and the suffixes not
    found.
    """
    found, missing = _mark(
        model, module_name_suffixes, flag, lambda name, _, wanted: name.endswith(wanted)
    )
    _refuse(missing if raise_if_not_found else [], "whose name ends in")
    return found, missing


def mark_configured(model: nn.Module, leaves: LeafModuleConfig | None) -> None:
    """Mark the modules that `zero_optimization.leaf_module` names.

    Raises ValueError for one that is not there.
    """
    if leaves is not None:
        set_z3_leaf_modules(model, leaves.classes)
        set_z3_leaf_modules_by_name(model, leaves.names)
        set_z3_leaf_modules_by_suffix(model, leaves.name_suffixes)
