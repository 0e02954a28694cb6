"""The keys of DeepSpeed that have no effect here, as fields of their sections; the keys that
DeepSpeed has removed; and old names. `idle_keys.json` lists them.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, create_model

from zero.config.keys import AnyCase, Count, DType, Fraction, Int, Positive, Section, key

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


# The types that the table names.
_VALUES: dict[str, Any] = {
    "bool": bool,
    "bool or object": bool | dict,
    "count": Count,
    "dtype": DType,
    "even": Annotated[Count, AfterValidator(_even)],
    "float": float,
    "fraction": Fraction,
    "gram or standard": Annotated[Literal["gram", "standard"], AnyCase()],
    "int": Int,
    "positive": Positive,
    "text": str,
    "text or list": list[str] | str,
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


def _fields(path: str) -> Iterator[tuple[str, Any]]:
    """The keys without effect of the section at `path`, as pydantic's `create_model` takes them."""
    for group in _GROUPS:
        if group["section"] != path:
            continue
        why = group["why"]
        rows = group["keys"] if isinstance(group["keys"], dict) else dict.fromkeys(group["keys"])
        for name, row in rows.items():
            row = row or {}
            if "only" in row:
                note = f"no other value is available: {why}"
                yield name, (_only(row["only"], why), key(row["only"], idle=note, exclude=True))
                continue
            values = _VALUES[row["values"]] if "values" in row else Any
            default = row.get("default")
            values = values | None if default is None else values
            yield name, (values, key(default, idle=why, exclude=True))


def _sections(path: str) -> dict[str, str]:
    """The names of the sections within the one at `path`, and why their keys have no effect."""
    prefix = f"{path}." if path else ""
    return {
        group["section"].removeprefix(prefix).partition(".")[0]: group["why"]
        for group in reversed(_GROUPS)
        if group["section"].startswith(prefix) and group["section"] != path
    }


S = TypeVar("S", bound=Section)


def with_idle_keys(path: str) -> Callable[[type[S]], type[S]]:
    """A class decorator: adds to the section at `path` its keys without effect, and the sections
    that have only such keys. They are checked like all others, but are not part of `model_dump`."""

    def complete(model: type[S]) -> type[S]:
        fields = dict(_fields(path))
        for name, why in _sections(path).items():
            if name not in model.model_fields:
                inner = with_idle_keys(f"{path}.{name}".lstrip("."))(IdleSection)
                fields[name] = inner | None, key(None, idle=why, exclude=True)
        return create_model(
            model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__,
            **fields,
        )  # fmt: skip

    return complete
