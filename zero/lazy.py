"""Packages whose names are loaded when they are first used (PEP 562), because torch takes seconds
to import, and some of what is in them does without it.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The function `__getattr__` of a package. `homes`: the module of each name. Any other name is
    that of a module in the package.
    """

    def load(name: str) -> Any:
        home = homes.get(name, f"{package}.{name}")
        try:
            found = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name != home:
                raise
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[package]) from None
        if not home.endswith(f".{name}"):
            found = getattr(found, name)
        setattr(sys.modules[package], name, found)
        return found

    return load
