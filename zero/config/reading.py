"""Reads a configuration from any accepted source, and explains each error in one line.

Nothing here knows the keys: the functions take the top section (a model class) or dotted names.
"""

import base64
import binascii
import difflib
import json
import os
import typing
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zero.config.keys import DEPRECATED_KEYS, REMOVED_KEYS, IdleSection, Section
from zero.errors import UsageError

# A configuration has five levels and about 40 keys. What has more than this is something else.
_MOST_LEVELS, _MOST_UNKNOWN = 32, 50


def read(source: Any) -> tuple[str, dict]:
    """Return (name for messages, JSON object) of any accepted source."""
    if isinstance(source, dict):
        return "DeepSpeed configuration dict", source
    if not isinstance(source, str | os.PathLike):
        raise UsageError(
            "DeepSpeed configuration: expected a path, a dict or JSON text, got "
            f"{type(source).__name__}"
        )
    if not os.fspath(source):
        raise UsageError("DeepSpeed configuration: the name of the file is empty")
    inline = _inline_json(source)
    place = os.fspath(source) if inline is None else "DeepSpeed configuration string"
    text = _read_file(place) if inline is None else inline
    try:
        value = _parse(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{place}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
        ) from error
    except RecursionError:
        raise UsageError(f"{place}: nested more than {_MOST_LEVELS} levels deep") from None
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{place}: expected a JSON object {{...}}, got {_show(value)}")
    return place, value


def _read_file(place: str) -> str:
    if os.path.exists(place) and not os.path.isfile(place):
        # Reading a pipe would wait for its writer.
        raise UsageError(f"{place}: cannot read the DeepSpeed configuration: not a regular file")
    try:
        return Path(place).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{place}: cannot read the DeepSpeed configuration: {reason}") from error


def _parse(text: str) -> Any:
    """Parse JSON.

    If `hjson` is installed, as it is with DeepSpeed, Hjson (comments, no quotes) is accepted too.
    """
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


def rename_deprecated(
    raw: dict, overriding: bool = False
) -> tuple[dict, list[tuple[str, str]], dict[str, str]]:
    """Return a copy of ``raw`` with every key in its section under its new name, the renames, and a
    message per clash.

    A dotted key means the nested one. ``overriding``: if both are given, the dotted one holds. Code
    wrote it later."""
    data, renamed, problems = _copied(raw), [], {}
    _nest_dotted(data, overriding, problems)
    for old, (new, convert) in DEPRECATED_KEYS.items():
        value = pop(data, old)
        if value is None:
            continue
        section, key = walk(data, new)
        if key in section:
            problems[old] = f"old name of {new}, which is given too; delete {old}"
            continue
        try:
            converted = convert(value[0])
        except ValueError as error:
            problems[old] = str(error)
            continue
        renamed.append((old, new))
        if converted is not None:
            section[key] = converted
    return data, renamed, problems


def _copied(value: Any, level: int = 0) -> Any:
    """Copy nested dicts and lists. Other values stay the same objects."""
    if level > _MOST_LEVELS:
        raise UsageError(f"DeepSpeed configuration: nested more than {_MOST_LEVELS} levels deep")
    if isinstance(value, list):
        return [_copied(item, level + 1) for item in value]
    if not isinstance(value, dict):
        return value
    for key in value:
        if not isinstance(key, str):
            raise UsageError(f"DeepSpeed configuration: the key {key!r} is not a string")
    return {key: _copied(item, level + 1) for key, item in value.items()}


def _nest_dotted(data: dict, overriding: bool, problems: dict[str, str]) -> None:
    for dotted in [key for key in data if "." in key]:
        value, section = data.pop(dotted), data
        *path, key = dotted.split(".")
        for part in path:
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            problems[dotted] = (
                f"contradicts {'.'.join(path)}, which is given too and is not an object; delete "
                "one of them"
            )
        elif key not in section or section[key] == "auto" or (overriding and value != "auto"):
            section[key] = value
        elif value not in ("auto", section[key]):
            problems[dotted] = (
                f"is {_show(value)} here, and {_show(section[key])} in its section; delete one of "
                "them"
            )


def walk(data: dict, dotted: str) -> tuple[dict, str]:
    """Return the dict that holds ``dotted`` and the last part of its name.

    The dict is empty if there is none.
    """
    *path, key = dotted.split(".")
    for part in path:
        data = data.get(part)
        if not isinstance(data, dict):
            return {}, key
    return data, key


def pop(data: dict, dotted: str) -> tuple[Any] | None:
    """Remove ``dotted``. Return a 1-tuple of its value, or None if it was missing."""
    section, key = walk(data, dotted)
    return (section.pop(key),) if key in section else None


def take_auto(data: dict, model: type[Section], prefix: str = "") -> set[str]:
    """Remove keys with the value "auto" that transformers or accelerate fill in later.

    Return their dotted names.
    """
    auto: set[str] = set()
    for key, value in list(data.items()):
        if isinstance(value, dict) and (section := section_of(model, key)) is not None:
            auto |= take_auto(value, section, f"{prefix}{key}.")
        elif value == "auto" and key in model.model_fields and model.about(key).get("auto"):
            auto.add(prefix + key)
            del data[key]
    return auto


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


def validate(data: dict, top: type[Section]) -> tuple[Any, dict[str, str]]:
    """Return the typed configuration, and a message for each wrong key, which is removed from
    ``data``.

    The configuration is None if it cannot be built even without the wrong keys.
    """
    found: dict[str, str] = {}
    try:
        return top.model_validate(data), found
    except ValidationError as error:
        for item in error.errors(include_url=False)[:1000]:
            found.setdefault(*_explain(item, data, top))
    for key in found:
        pop(data, key)
    with suppress(ValidationError):
        return top.model_validate(data), found
    return None, found


def _explain(error: dict, data: dict, top: type[Section]) -> tuple[str, str]:
    """Return (dotted key, message) for one pydantic error."""
    path, model = [], top
    for part in error["loc"]:
        # Pydantic appends the branch of a union and the index of a list element: not keys of the
        # file.
        if model is None or not isinstance(part, str):
            break
        path.append(part)
        model = section_of(model, part)
    key = ".".join(path)
    if error["type"] == "missing":
        return key, "is required"
    if error["type"] == "value_error":
        return key, str(error["ctx"]["error"])
    section, name = walk(data, key)
    given = section.get(name, error["input"])
    if given == "auto":
        return (
            key,
            "'auto' is not filled in by transformers or accelerate for this key; set a value",
        )
    if error["type"] not in _EXPECTED:
        return key, f"{error['msg']}, got {_show(given)}"
    return (
        key,
        f"expected {_EXPECTED[error['type']].format(**error.get('ctx', {}))}, got {_show(given)}",
    )


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, default=repr)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"the string {text}" if isinstance(value, str) else text


def take_unknown(data: dict, top: type[Section]) -> tuple[list[str], dict[str, str]]:
    """Remove unknown keys. Return those that are ignored, and a message for each of the others."""
    ignored: list[str] = []
    problems: dict[str, str] = {}
    sections = [((), data, top)]
    for path, values, model in sections:
        unknown = [key for key in values if key not in model.model_fields]
        if len(unknown) > _MOST_UNKNOWN:
            name = ".".join((*path, _short(unknown[0])))
            problems[name] = (
                f"unknown key, as {len(unknown) - 1} others: this is not a DeepSpeed configuration"
            )
            unknown, values = (
                [],
                {key: value for key, value in values.items() if key in model.model_fields},
            )
        for key in unknown:
            name, message = ".".join((*path, _short(key))), _unknown_key(path, key, model, top)
            del values[key]
            if message is None:
                ignored.append(name)
            else:
                problems[name] = message
        for key, value in values.items():
            if isinstance(value, dict) and (inner := section_of(model, key)) is not None:
                sections.append(((*path, key), value, inner))
    return ignored, problems


def _unknown_key(
    section: tuple[str, ...], key: str, model: type[Section], top: type[Section]
) -> str | None:
    """Return the message about an unknown key, or None if it is ignored."""
    everywhere = list(_all_keys(top))
    homes = [".".join(full) for full in everywhere if full[-1] == key]
    if homes:
        return f"unknown key here; it is a valid key as {' or '.join(homes[:3])}"
    here = [(*section, name) for name in model.model_fields]
    old = [tuple(name.split(".")) for name in (*DEPRECATED_KEYS, *REMOVED_KEYS)]
    here += [name for name in old if name[:-1] == section]
    # A short name in another section may resemble this one by chance.
    for names in (here, [name for name in everywhere if len(name[-1]) >= 8]):
        if similar := [name for name in names if _is_misspelt(key, name[-1])]:
            best = max(similar, key=lambda name: _likeness(key, name[-1]))
            return f"unknown key; did you mean {'.'.join(best)}?"
    if model.lenient:
        return None
    nearest = max(here, key=lambda name: _likeness(key, name[-1]))
    return f"not a key of DeepSpeed 0.19; the nearest valid key is {'.'.join(nearest)}"


def _likeness(key: str, known: str) -> float:
    """Share of matching characters."""
    if len(key) > 2 * len(known):
        return 0.0
    return difflib.SequenceMatcher(
        None, key.lower().replace("-", "_"), known.lower(), autojunk=False
    ).ratio()


def _is_misspelt(key: str, known: str) -> bool:
    """Whether `key` is `known` with one letter changed, missing, added or moved.

    A long name may have several.
    """
    return _likeness(key, known) >= (0.75 if len(known) >= 8 else 1 - 1 / len(known) - 1e-9)


def _short(key: str) -> str:
    return key if len(key) <= 60 else key[:57] + "..."


def section_of(model: type[Section], key: str) -> type[Section] | None:
    """Return the section that the key ``key`` of ``model`` holds, or None if it holds a value."""
    field = model.model_fields.get(key)
    kinds = [] if field is None else [field.annotation, *typing.get_args(field.annotation)]
    return next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None
    )


def _all_keys(model: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every valid key outside of sections without effect."""
    for key in model.model_fields:
        yield (*prefix, key)
        section = section_of(model, key)
        if section is not None and not issubclass(section, IdleSection):
            yield from _all_keys(section, (*prefix, key))
