"""Reads the defaults of torch and transformers in their source, because both take seconds to
import.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@cache
def defaults(module: str, kind: str) -> dict[str, Any]:
    """The defaults of a class's arguments, or of a dataclass's fields, as far as they are literals.

    module: such as "torch.optim.sgd".
    """
    package, *path = module.split(".")
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, package
    file = Path(spec.origin).parent.joinpath(*path).with_suffix(".py")
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    (of_kind,) = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind)
    given: dict[str, Any] = {}
    for node in of_kind.body:
        match node:
            case ast.AnnAssign(target=ast.Name(name), value=ast.Call(keywords=options)):
                given[name] = {each.arg: each.value for each in options}.get("default")
            case ast.FunctionDef(name="__init__", args=arguments):
                values = [*arguments.defaults, *arguments.kw_defaults]
                names = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
                given |= zip(names[len(names) - len(values) :], values, strict=True)
    found: dict[str, Any] = {}
    for name, value in given.items():
        with suppress(ValueError):
            found[name] = ast.literal_eval(value)
    return found
