"""The import hook: one object on `sys.meta_path` that answers to the name `deepspeed`.

It follows two documented protocols of the import system: `find_spec` (for `import deepspeed` and
`importlib.util.find_spec`) and `find_distributions` (for `importlib.metadata`). Nothing is patched.
`names` has the meaning of each name."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from zero.errors import UsageError
from zero.integrations.deepspeed.names import NAMES, REPORTED_VERSION, instead_of

PACKAGE = "deepspeed"


def _missing(full_name: str) -> str:
    return f"'{full_name}' is not provided by zero; {instead_of(full_name)}"


@cache
def _stand_in(full_name: str) -> type:
    """A class that stands for a name which zero does not have, and raises UsageError when called.

    It is a class so that scripts can set methods of it, and ask whether an object is one.
    """

    def __init__(self: object, *args: object, **kwargs: object) -> None:  # noqa: N807
        raise UsageError(_missing(full_name))

    return type(full_name.rpartition(".")[2], (), {"__init__": __init__})


class FacadeModule(ModuleType):
    """A module of the facade. It looks a name up in the table when the name is first used."""

    def __getattr__(self, name: str) -> Any:
        full_name = f"{self.__name__}.{name}"
        if full_name in NAMES:
            return importlib.import_module(full_name)
        names = NAMES[self.__name__]
        rest = "" if name.startswith("__") else names.get("*", "")
        home, _, attribute = names.get(name, f"{rest}:{name}").partition(":")
        if home == "!":
            return _stand_in(full_name)
        value = getattr(importlib.import_module(home), attribute, None) if home else None
        if value is None:
            raise AttributeError(_missing(full_name), name=name, obj=self)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *NAMES[self.__name__]} - {"*"})


class FacadeDistribution(importlib.metadata.Distribution):
    """The installed-package record of the facade."""

    def read_text(self, filename: str) -> str | None:
        metadata = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {REPORTED_VERSION}\n"
        return {"METADATA": metadata, "top_level.txt": f"{PACKAGE}\n"}.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class FacadeFinder(importlib.metadata.DistributionFinder, Loader):
    """Finds the facade's modules and its distribution record, and loads the modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in NAMES:
            # All are packages: then Python asks here for each missing name of `from ... import`.
            origin = "zero.integrations.deepspeed"
            return ModuleSpec(fullname, self, origin=origin, is_package=True)
        if fullname.endswith(".__main__") and "main" in NAMES.get(
            fullname[: -len(".__main__")], ()
        ):
            return ModuleSpec(fullname, self)
        if fullname.startswith(f"{PACKAGE}."):
            # With the name of the module itself Python would put a message of its own in place.
            raise ModuleNotFoundError(_missing(fullname), name=PACKAGE)
        return None

    def create_module(self, spec: ModuleSpec) -> FacadeModule:
        return FacadeModule(spec.name, f"zero under the name {spec.name}")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the names are resolved at their first use."""

    def get_code(self, fullname: str) -> CodeType:
        """What `python -m MODULE` runs, where MODULE has a function `main`."""
        source = f"from {fullname.removesuffix('.__main__')} import main; main()"
        return compile(source, fullname, "exec")

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        context = context or importlib.metadata.DistributionFinder.Context()
        # A search in named folders is for what they contain. No folder contains the facade.
        if context.path is sys.path and (context.name or PACKAGE).lower() == PACKAGE:
            yield FacadeDistribution()


def is_installed() -> bool:
    """Whether the facade is on `sys.meta_path` of this process."""
    return any(isinstance(finder, FacadeFinder) for finder in sys.meta_path)


def install() -> FacadeFinder:
    """Put the facade before every other finder: it is then found first, even if DeepSpeed is
    installed.
    """
    facade = FacadeFinder()
    sys.meta_path.insert(0, facade)
    return facade
