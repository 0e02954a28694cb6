"""Packages whose names are loaded when they are first used (PEP 562), because torch takes seconds
to import, and some of what is in them does without it.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The function `__getattr__` of a package. `homes`: the module of each name, which may be a
    module itself.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        found = home if home.__name__.endswith(f".{name}") else getattr(home, name)
        setattr(sys.modules[package], name, found)
        return found

    return load
