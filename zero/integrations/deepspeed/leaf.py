"""Marks leaf modules, whose parameters are always gathered together, and parameters that one module
reads from another. The functions are DeepSpeed's.

If the forward of a module chooses among its children, as a mixture of experts does, and ranks may
choose differently, mark the module as a leaf, because all ranks must take part in each all-gather.
Transformer blocks are gathered as a whole anyway, so you need leaves only outside of them, and in
models that do not name their blocks. Call these functions before `initialize`.

A leaf is a module with the attribute `zero.core.layout.LEAF_FLAG`, and `EXTERNAL_PARAMETERS` lists
what a module reads. This file knows nothing else about how groups are formed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zero.config import LeafModuleConfig
from zero.core.layout import EXTERNAL_PARAMETERS, LEAF_FLAG
from zero.errors import UsageError


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all instances of these classes, or of classes with these names, as leaves.

    Returns the marked modules. Raises ValueError if there are none, unless `raise_if_not_found` is
    false.
    """
    return _mark(model, "of class", leaf_module_classes, True, raise_if_not_found)[0]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`."""
    return _mark(model, "of class", leaf_module_classes, False, raise_if_not_found)[0]


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark, or unmark, the modules with these names. Returns them, and the names that none has.

    Raises ValueError if there are none, unless `raise_if_not_found` is false.
    """
    return _mark(model, "named", module_names, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """As `set_z3_leaf_modules_by_name`, for modules whose names end so."""
    return _mark(model, "whose name ends in", module_name_suffixes, flag, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark one module."""
    setattr(model, LEAF_FLAG, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is marked as a leaf."""
    return getattr(model, LEAF_FLAG, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are marked as leaves."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def mark_configured(model: nn.Module, leaves: LeafModuleConfig | None) -> None:
    """Mark the modules that `zero_optimization.leaf_module` names, by class, name or suffix of the
    name.

    Raises ValueError for a name that no module has, and if no module is of one of the classes.
    """
    if leaves is None:
        return
    if leaves.classes:
        set_z3_leaf_modules(model, leaves.classes)
    for what, wanted in (("named", leaves.names), ("whose name ends in", leaves.name_suffixes)):
        if missing := _mark(model, what, wanted, True, False)[1]:
            _refuse(what, missing)


def _is_of_class(name: str, module: nn.Module, wanted: type | str) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    own = type(module)
    return wanted in (own.__name__, f"{own.__module__}.{own.__qualname__}")


# By what modules are chosen, as messages say it: whether a name and a module are what is wanted.
_MATCHES: dict[str, Callable[[str, nn.Module, Any], bool]] = {
    "of class": _is_of_class,
    "named": lambda name, module, wanted: name == wanted,
    "whose name ends in": lambda name, module, wanted: name.endswith(wanted),
}


def _mark(
    model: nn.Module, what: str, wanted: Sequence[Any], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[Any]]:
    """Mark or unmark the modules that match. Returns them, and what of `wanted` matches none."""
    found: list[nn.Module] = []
    missing = list(wanted)
    for name, module in model.named_modules():
        if matching := [each for each in wanted if _MATCHES[what](name, module, each)]:
            set_z3_leaf_module(module, flag)
            found.append(module)
            missing = [each for each in missing if each not in matching]
    if raise_if_not_found and not found:
        _refuse(what, missing)
    return found, missing


def _refuse(what: str, missing: Sequence[object]) -> None:
    raise UsageError(f"leaf modules: the model has no module {what} {', '.join(map(str, missing))}")


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that `module`'s own forward reads `parameter`, which another module owns. It is then
    unsharded for the calls of both modules.

    Call it before `zero.initialize`. Without it, such a parameter is unsharded at its first read,
    and stays unsharded until the end of the backward pass."""
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(
            "register_external_parameter: expected a torch.nn.Parameter, got "
            f"{type(parameter).__name__}"
        )
    module.__dict__.setdefault(EXTERNAL_PARAMETERS, []).append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`."""
    registered = module.__dict__.get(EXTERNAL_PARAMETERS, [])
    if not any(known is parameter for known in registered):
        raise UsageError(
            "unregister_external_parameter: this parameter is not registered for this module"
        )
    registered[:] = [known for known in registered if known is not parameter]
