"""How a key of the configuration is declared, and the types of values.

A key with an effect is declared once, as a field of its section. The section's docstring says under
"Attributes" what the key does; a list there says what individual values mean, with `N` for any
other one. The tables of `docs/configuration.md`, the table at the start of a run, `zero explain`
and the error messages all come from these declarations. Keys without effect are in
`idle_keys.json`, and those that are only passed on to an optimizer or schedule in `optim.json`.

Names, types and defaults follow DeepSpeed 0.19.8 (``runtime/config.py``, ``runtime/zero/config.py``
and the section files that they import)."""

import inspect
import re
import sys
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """One JSON object of the configuration.

    No value is converted silently. No number is infinite or NaN.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )
    # Unknown keys are errors. In a lenient section only those that resemble a known key are.
    lenient: ClassVar[bool] = False

    @classmethod
    def about(cls, name: str) -> dict[str, str]:
        """What `key` noted about a field: "needs", "auto", "unit" and "idle", where they apply."""
        notes = cls.model_fields[name].json_schema_extra
        return {each: str(text) for each, text in notes.items()} if isinstance(notes, dict) else {}

    @classmethod
    def describe(cls, name: str) -> tuple[str, dict[str, str]]:
        """What a key does, and a dict of what its values mean, both from the docstring."""
        for section in cls.__mro__:
            _, _, attributes = inspect.cleandoc(section.__doc__ or "").partition("Attributes:\n")
            for entry in re.split(r"\n(?=    \w)", "\n" + attributes):
                found, _, description = entry.strip().partition(": ")
                if found == name:
                    text, *meanings = re.split(r"\n\s+- ", description)
                    pairs = [" ".join(item.split()).partition(": ") for item in meanings]
                    return " ".join(text.split()), {value: text for value, _, text in pairs}
        return "", {}

    def why_idle(self, name: str) -> str | None:
        """Why the other keys of its section leave `name` without effect; None if it has one."""
        return None


def key(
    default: Any, *, needs: str = "", auto: str = "", unit: str = "", idle: str = "", **options: Any
) -> Any:
    """A field of a section with notes about its key.

    Args:
        needs: the setting without which the key has no effect.
        auto: the argument of transformers or accelerate that replaces "auto"; without it "auto" is
            an error.
        unit: of a number: "elements", "bytes" or "power of 2".
        idle: why the key never has an effect.
        options: of pydantic's `Field`.
    """
    notes: dict[str, Any] = {"needs": needs, "auto": auto, "unit": unit, "idle": idle}
    notes = {name: text for name, text in notes.items() if text}
    return Field(default, json_schema_extra=notes, **options)


class AnyCase:
    """In `Annotated[Literal[...], AnyCase()]`: the words are accepted in any letter case."""

    def __get_pydantic_core_schema__(
        self, literal: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        words = {word.lower(): word for word in get_args(literal)}

        def spelt(given: Any) -> Any:
            return words.get(str(given).lower(), given)

        return core_schema.no_info_before_validator_function(spelt, handler(literal))


def _whole(value: Any) -> Any:
    # JSON has no integers in scientific notation: 1e9 arrives as a float and means 1000000000.
    return int(value) if type(value) is float and value.is_integer() else value


WHOLE = BeforeValidator(_whole)

# Names of torch's: reading a configuration needs no torch, which takes seconds to import.
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
}


def _parse_dtype(value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in _DTYPES:
        raise ValueError(f"expected one of 'fp32', 'fp16', 'bf16', got {value!r}")
    return _DTYPES[value.lower()]


Int = Annotated[int, WHOLE]
Count = Annotated[int, Field(ge=0, le=sys.maxsize), WHOLE]
Positive = Annotated[int, Field(gt=0, le=sys.maxsize), WHOLE]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Flag = Annotated[bool, BeforeValidator(lambda value: bool(value) if value in (0, 1) else value)]
Device = Annotated[Literal["none", "cpu", "nvme"], AnyCase()]
DType = (
    Annotated[
        str,
        PlainValidator(_parse_dtype),
        WithJsonSchema({"enum": ["fp32", "fp16", "bf16"]}),
    ]
    | None
)
Names = Annotated[
    list[str], BeforeValidator(lambda names: [names] if isinstance(names, str) else names)
]
_Decay = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[_Decay, _Decay], Field(strict=False)]
# A number, or a list with one for each parameter group of the optimizer.
Rates = NonNegative | Annotated[list[NonNegative], Field(min_length=1)]
Momenta = Fraction | Annotated[list[Fraction], Field(min_length=1)]
