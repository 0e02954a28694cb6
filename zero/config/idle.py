"""Keys that are listed in tables instead of declared: those of DeepSpeed that have no effect here,
and those whose values are only passed on, as fields of their sections. Also the keys that DeepSpeed
has removed, and old names. `idle_keys.json` lists all but the second kind, which `optim.json` has.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, create_model

from zero.config.keys import (
    WHOLE,
    AnyCase,
    Betas,
    Count,
    DType,
    Fraction,
    Int,
    Momenta,
    NonNegative,
    Positive,
    Rates,
    Section,
    key,
)

_TABLE = json.loads(Path(__file__).with_name("idle_keys.json").read_text(encoding="utf-8"))
_GROUPS: list[dict[str, Any]] = _TABLE["without effect"]
REMOVED_KEYS: dict[str, str] = _TABLE["removed from DeepSpeed"]
OLD_NAMES: dict[str, str] = _TABLE["old names"]


class IdleSection(Section):
    """A section of which no key has an effect."""

    lenient = True


def _even(elements: int) -> int:
    if elements % 2:
        # DeepSpeed's words, for what it refuses.
        raise ValueError(
            "allgather_bucket_size must be a multiple of nccl_start_alignment_factor, which is 2"
        )
    return elements


def _in_order(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1]:
        raise ValueError(f"expected two numbers above 0, the smaller one first, got {list(pair)}")
    return pair


# The types that the tables name.
_VALUES: dict[str, Any] = {
    "betas": Betas,
    "bool": bool,
    "bool or object": bool | dict,
    "count": Count,
    "dtype": DType,
    "even": Annotated[Count, AfterValidator(_even)],
    "float": float,
    "fraction": Fraction,
    "from -1": Annotated[int, Field(ge=-1), WHOLE],
    "gram or standard": Annotated[Literal["gram", "standard"], AnyCase()],
    "int": Int,
    "log or linear": Annotated[Literal["log", "linear"], AnyCase()],
    "momenta": Momenta,
    "number": NonNegative,
    "positive": Positive,
    "rates": Rates,
    "text": str,
    "text or list": list[str] | str,
    "two in order": Annotated[tuple[float, float], Field(strict=False), AfterValidator(_in_order)],
}


def _only(flag: bool, why: str) -> Any:
    """The type of a flag of which only one value is available, because ignoring the other would
    change the result.
    """

    def check(value: bool) -> bool:
        if value != flag:
            raise ValueError(f"{value!r} is not available: {why}; use {flag!r}")
        return value

    return Annotated[bool, AfterValidator(check)]


Rows = Mapping[str, dict[str, Any] | None]


def _fields(rows: Rows, why: str = "") -> Iterator[tuple[str, Any]]:
    """Keys as pydantic's `create_model` takes them, from the rows of a table. `why`: why they have
    no effect.
    """
    for name, row in rows.items():
        row = row or {}
        if "only" in row:
            note = f"no other value is available: {why}"
            yield name, (_only(row["only"], why), key(row["only"], idle=note, exclude=True))
            continue
        values = _VALUES[row["values"]] if "values" in row else Any
        default = row.get("default")
        values = values | None if default is None else values
        field = key(default, idle=why, auto=row.get("auto", ""), exclude=bool(why))
        yield name, (values, field)


def _sections(path: str) -> dict[str, str]:
    """The names of the sections within the one at `path`, and why their keys have no effect."""
    prefix = f"{path}." if path else ""
    return {
        group["section"].removeprefix(prefix).partition(".")[0]: group["why"]
        for group in reversed(_GROUPS)
        if group["section"].startswith(prefix) and group["section"] != path
    }


S = TypeVar("S", bound=Section)


def with_idle_keys(path: str, acting: Rows | None = None) -> Callable[[type[S]], type[S]]:
    """A class decorator: adds to the section at `path` its keys without effect, and the sections
    that have only such keys. They are checked like all others, but are not part of `model_dump`.

    `acting`: rows of the keys with an effect that the class does not declare."""

    def complete(model: type[S]) -> type[S]:
        fields = dict(_fields(acting or {}))
        for group in _GROUPS:
            if group["section"] == path:
                keys = group["keys"]
                rows = keys if isinstance(keys, dict) else dict.fromkeys(keys)
                fields |= _fields(rows, group["why"])
        for name, why in _sections(path).items():
            if name not in model.model_fields:
                inner = with_idle_keys(f"{path}.{name}".lstrip("."))(IdleSection)
                fields[name] = inner | None, key(None, idle=why, exclude=True)
        return create_model(
            model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__,
            **fields,
        )  # fmt: skip

    return complete
