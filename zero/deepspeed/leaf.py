"""Leaf modules: modules that are gathered as a whole, by DeepSpeed's names.

A module whose forward chooses among its children (a mixture of experts) must be a leaf wherever ranks may choose
differently: what a unit needs is gathered by all ranks or by none. Transformer blocks are whole units anyway; this is
for what lies outside of them, and for models that do not name their blocks. Set it before `zero.initialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from zero.errors import UsageError
from zero.layout import LEAF_FLAG


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module itself is a leaf."""
    return getattr(model, LEAF_FLAG, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All leaf modules in `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make this module itself a leaf, or not."""
    setattr(model, LEAF_FLAG, flag)


def _flag(model: nn.Module, flag: bool, chosen: Callable[[str, nn.Module], bool]) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if chosen(name, module)]
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _check(missing: Sequence[object], what: str, raise_if_not_found: bool) -> None:
    if missing and raise_if_not_found:
        raise UsageError(f"leaf modules: the model has no module {what} {', '.join(map(str, missing))}")


def _names_of_class(module: nn.Module) -> set[str]:
    kind = type(module)
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type | str],
    raise_if_not_found: bool = True,
    flag: bool = True,
) -> list[nn.Module]:
    """Make all instances of these classes (or of classes with these names) leaves; return them.

    Raises ValueError if there are none.
    """
    kinds = tuple(kind for kind in leaf_module_classes if isinstance(kind, type))
    names = {kind for kind in leaf_module_classes if isinstance(kind, str)}
    found = _flag(model, flag, lambda _, module: isinstance(module, kinds) or bool(names & _names_of_class(module)))
    _check([] if found else leaf_module_classes, "of class", raise_if_not_found)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`."""
    return set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found, flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules with these names in `model.named_modules()` leaves; return them and the names not found."""
    wanted = list(module_names)
    found = _flag(model, flag, lambda name, _: name in wanted)
    missing = sorted(set(wanted) - dict(model.named_modules()).keys())
    _check(missing, "named", raise_if_not_found)
    return found, missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules whose names end in one of these leaves; return them and the suffixes not found."""
    wanted = tuple(module_name_suffixes)
    found = _flag(model, flag, lambda name, _: name.endswith(wanted))
    names = dict(model.named_modules())
    missing = [suffix for suffix in wanted if not any(name.endswith(suffix) for name in names)]
    _check(missing, "whose name ends in", raise_if_not_found)
    return found, missing
