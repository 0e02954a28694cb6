"""From any accepted source of a configuration to a plain dict, and from pydantic's errors to one line each.

Nothing here knows the keys: the functions take the top section (a model class) or dotted names.
"""

import base64
import binascii
import copy
import difflib
import json
import os
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from zero.config.keys import AUTO_KEYS, DEPRECATED_KEYS, Section


def read(source: Any) -> tuple[str, dict]:
    """(name for messages, the JSON object) of any accepted source."""
    if isinstance(source, dict):
        return "DeepSpeed configuration dict", source
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"DeepSpeed configuration: expected a path, a dict or JSON text, got {type(source).__name__}")
    text = _inline_json(source)
    if text is not None:
        place = "DeepSpeed configuration string"
    else:
        place = os.fspath(source)
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{place}: cannot read the DeepSpeed configuration: {reason}") from error
    try:
        value = _parse(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place}: expected a JSON object {{...}}, got {_show(value)}")
    return place, value


def _parse(text: str) -> Any:
    """JSON; or Hjson (with comments, without quotes) where `hjson` is installed, as it is with DeepSpeed."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        try:
            import hjson
        except ImportError:
            raise error from None
        return hjson.loads(text, object_pairs_hook=_refuse_duplicates)


def _inline_json(source: str | os.PathLike) -> str | None:
    """The JSON text that ``source`` itself is, plain or in base64; None if it is a path."""
    if not isinstance(source, str) or os.path.exists(source):
        return None
    if source.lstrip().startswith(("{", "[")):
        return source
    try:
        text = base64.urlsafe_b64decode(source).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{key}: given {count} times in one object; keep one of them")
    return dict(pairs)


def rename_deprecated(raw: dict) -> tuple[dict, list[tuple[str, str]], list[tuple[str, str]]]:
    """A copy of ``raw`` with old keys under their new names, the renames made, and the clashes found."""
    data, renamed, problems = copy.deepcopy(raw), [], []
    for old, (new, convert) in DEPRECATED_KEYS.items():
        value = pop(data, old)
        if value is None:
            continue
        section, key = walk(data, new)
        if key in section:
            problems.append((old, f"old name of {new}, which is given too; delete {old}"))
            continue
        renamed.append((old, new))
        if (converted := convert(value[0])) is not None:
            section[key] = converted
    return data, renamed, problems


def walk(data: dict, dotted: str) -> tuple[dict, str]:
    """The innermost dict on the way to ``dotted`` and the last part of the name; an empty dict where there is none."""
    *path, key = dotted.split(".")
    for part in path:
        data = data.get(part)
        if not isinstance(data, dict):
            return {}, key
    return data, key


def pop(data: dict, dotted: str) -> tuple[Any] | None:
    """Remove ``dotted``; a 1-tuple of its value, None if it was not there."""
    section, key = walk(data, dotted)
    return (section.pop(key),) if key in section else None


def take_auto(data: dict, prefix: str, auto: set[str]) -> None:
    """Move the dotted names of fillable keys whose value is "auto" from ``data`` to ``auto``."""
    for key, value in list(data.items()):
        if isinstance(value, dict):
            take_auto(value, f"{prefix}{key}.", auto)
        elif value == "auto" and prefix + key in AUTO_KEYS:
            auto.add(prefix + key)
            del data[key]


Model = TypeVar("Model", bound=Section)

# Share of matching characters (difflib) from which one key is taken for a misspelling of another.
_ALIKE = 0.6

_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "finite_number": "a finite number",
    "greater_than": "a number greater than {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than_equal": "a number of at most {le:g}",
    "literal_error": "one of {expected}",
}


def validate(data: dict, top: type[Model]) -> tuple[Model | None, dict[str, str]]:
    """The typed configuration and a message for each wrong key; None if it cannot be built even without those keys.

    Wrong keys are removed from ``data``.
    """
    try:
        return top.model_validate(data), {}
    except ValidationError as error:
        found: dict[str, str] = {}
        for item in error.errors(include_url=False):
            found.setdefault(*_explain(item, data, top))
    for key in found:
        pop(data, key)
    try:
        return top.model_validate(data), found
    except ValidationError:
        return None, found


def _explain(error: dict, data: dict, top: type[Section]) -> tuple[str, str]:
    """(dotted key, message) of one pydantic error."""
    path, model = [], top
    for part in error["loc"]:
        # Pydantic appends the branch of a union and the index of a list element: not keys of the file.
        if model is None or not isinstance(part, str):
            break
        path.append(part)
        model = _section_of(model, part)
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return key, _unknown_key(path, top)
    if error["type"] == "missing":
        return key, "is required"
    if error["type"] == "value_error":
        return key, str(error["ctx"]["error"])
    section, name = walk(data, key)
    given = section.get(name, error["input"])
    if given == "auto":
        return key, "'auto' is not filled in by transformers or accelerate for this key; set a value"
    if error["type"] not in _EXPECTED:
        return key, f"{error['msg']}, got {_show(given)}"
    return key, f"expected {_EXPECTED[error['type']].format(**error.get('ctx', {}))}, got {_show(given)}"


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, default=repr)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"the string {text}" if isinstance(value, str) else text


def _unknown_key(path: list[str], top: type[Section]) -> str:
    """What to say about a key that its section does not have."""
    *section, key = path
    everywhere = list(_all_keys(top))
    homes = [".".join(full) for full in everywhere if full[-1] == key]
    if homes:
        return f"unknown key here; it is a valid key as {' or '.join(homes[:3])}"

    def likeness(full: tuple[str, ...]) -> float:
        return difflib.SequenceMatcher(None, key.lower(), full[-1].lower()).ratio()

    best = max((full for full in everywhere if list(full[:-1]) == section), key=likeness)
    if likeness(best) < _ALIKE:
        elsewhere = max(everywhere, key=likeness)
        best = elsewhere if likeness(elsewhere) >= _ALIKE else best
    if likeness(best) < _ALIKE:
        return f"not a key of DeepSpeed 0.19; the nearest valid key is {'.'.join(best)}"
    return f"unknown key; did you mean {'.'.join(best)}?"


def _section_of(model: type[Section], key: str) -> type[Section] | None:
    """The model behind key ``key`` of ``model`` if the value is an object with known keys, else None."""
    field = model.model_fields.get(key)
    kinds = [] if field is None else [field.annotation, *typing.get_args(field.annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _all_keys(model: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every valid key."""
    for key in model.model_fields:
        yield (*prefix, key)
        if (section := _section_of(model, key)) is not None:
            yield from _all_keys(section, (*prefix, key))
