"""The keys of DeepSpeed that are not declared as fields: those without effect, those that DeepSpeed
has removed, and old names. `idle_keys.json` lists them."""

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, TypeAdapter

from zero.config.keys import AnyCase, Count, DType, Fraction, Int, Positive


class IdleKey(NamedTuple):
    """A valid key without effect.

    `why` is what a user who gives it is told. `values` names the type of its values; "" accepts
    anything.
    """

    why: str
    default: Any = None
    values: str = ""
    only: bool = False

    def check(self, value: Any) -> None:
        """Raise ValueError, or pydantic's ValidationError, for a value that DeepSpeed would refuse,
        or whose being ignored would change the result.
        """
        if self.values and not (value is None and self.default is None):
            _adapter(self.values).validate_python(value)
        if self.only and value != self.default:
            why = self.why.removeprefix(_ONLY)
            raise ValueError(f"{value!r} is not available: {why}; use {self.default!r}")


def _even(elements: int) -> int:
    if elements % 2:
        # DeepSpeed's words, for what it refuses.
        raise ValueError(
            "allgather_bucket_size must be a multiple of nccl_start_alignment_factor, which is 2"
        )
    return elements


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


@cache
def _adapter(values: str) -> TypeAdapter:
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(_VALUES[values], config=config)


_ONLY = "no other value is available: "
_TABLE = json.loads(Path(__file__).with_name("idle_keys.json").read_text(encoding="utf-8"))
REMOVED_KEYS: dict[str, str] = _TABLE["removed from DeepSpeed"]
OLD_NAMES: dict[str, str] = _TABLE["old names"]


def _read_idle_keys() -> dict[str, IdleKey]:
    found = {}
    for group in _TABLE["without effect"]:
        rows = group["keys"] if isinstance(group["keys"], dict) else dict.fromkeys(group["keys"])
        for name, row in rows.items():
            path = f"{group['section']}.{name}".lstrip(".")
            row = row or {}
            if "only" in row:
                found[path] = IdleKey(_ONLY + group["why"], row["only"], "bool", only=True)
            else:
                found[path] = IdleKey(group["why"], **row)
    return found


def _names_by_section() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in IDLE_KEYS:
        while path:
            section, _, name = path.rpartition(".")
            found.setdefault(section, set()).add(name)
            path = section
    return found


# By dotted name.
IDLE_KEYS = _read_idle_keys()
# By section: the names of its keys without effect, and of the sections in it.
IDLE_NAMES = _names_by_section()
