"""`load_config` reads a configuration from any supported source, checks it, and explains each
mistake in one line.
"""

import base64
import binascii
import json
import os
import typing
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zero.config.idle import OLD_NAMES, REMOVED_KEYS, IdleSection
from zero.config.keys import Section
from zero.config.settings import Config, Origin
from zero.errors import UsageError, nearest

# A configuration has five levels and about 40 keys. A file with more than this is something else.
_MOST_LEVELS, _MOST_UNKNOWN = 32, 50
# Python itself refuses to convert integers of more than 4,300 digits.
_MOST_DIGITS = 100
# The beginnings of keys that are notes for readers, unless they resemble a valid key.
_NOTES = ("_", "//", "#")
# Sections of which DeepSpeed drops each "auto": the key has its default.
_AUTO_SECTIONS = (
    "zero_optimization fp16 bf16 tensor_parallel compile comms_logger tensorboard wandb "
    "csv_monitor".split()
)
# "auto" must have been replaced in these before the engine starts: the first decides what is
# sharded, and the second has no default.
_AUTO_WITHOUT_DEFAULT = ("zero_optimization.stage", "scheduler.params.total_num_steps")

Source = str | os.PathLike | dict


def load_config(source: Source, *, allow_auto: bool = False) -> Config:
    """Read and check a DeepSpeed configuration.

    Args:
        source: the path of a JSON file, a dict (which is not changed), JSON text, or JSON text in
            URL-safe base64.
        allow_auto: whether to accept "auto" for keys that transformers or accelerate fill in later.
            They have their defaults until then (batch sizes: None). Otherwise "auto" is an error
            for keys that have no default in DeepSpeed.

    Raises:
        ValueError: if something is wrong. The message has a line for each wrong key, with the file,
            the key, what was expected, and the nearest valid key.
    """
    place, raw = read(source)
    data = _copied(raw)
    origin = Origin(place, raw)
    problems = _nest_dotted(data, overriding=isinstance(source, dict))
    problems |= _rename_old(data, origin.renamed)
    origin.written = _copied(data)
    for key, reason in REMOVED_KEYS.items():
        section, name = find(data, key)
        # A section that is switched off is harmless.
        if section.pop(name, {"enabled": False}) != {"enabled": False}:
            problems.setdefault(key, reason)
    misspelt = _sort(data, Config, "", origin)
    if origin.ignored and {_short(key) for key in raw} <= {*origin.ignored}:
        problems[origin.ignored[0]] = (
            "neither this nor any other key is a key of DeepSpeed: is this the right file?"
        )
    config, wrong = _validate(data)
    problems |= wrong | misspelt
    for section in ("optimizer", "scheduler"):
        # The type decides which settings exist, so messages about them would mislead.
        if f"{section}.type" in problems:
            settings = f"{section}.params."
            problems = {key: text for key, text in problems.items() if not key.startswith(settings)}
    if config is not None:
        config._origin = origin
        for key in _AUTO_WITHOUT_DEFAULT:
            if key in origin.auto and not allow_auto:
                problems.setdefault(key, "is still 'auto' and has no default; set a value")
        stage_known = not {"zero_optimization.stage"} & {*origin.auto, *problems}
        for key, message in _contradictions(config, stage_known):
            problems.setdefault(key, message)
    if problems:
        lines = [f"{place}: {key}: {message}" for key, message in problems.items()]
        raise UsageError("\n".join(lines))
    assert config is not None  # else there would be problems
    return config


# -- reading


def read(source: object) -> tuple[str, dict]:
    """Return (name for messages, JSON object) of any accepted source."""
    if isinstance(source, dict):
        return "DeepSpeed configuration dict", source
    if not isinstance(source, str | os.PathLike):
        kind = type(source).__name__
        raise UsageError(
            f"DeepSpeed configuration: expected a path, a dict or JSON text, got {kind}"
        )
    place = os.fspath(source)
    if not place:
        raise UsageError("DeepSpeed configuration: the name of the file is empty")
    text = _inline_json(source)
    cannot = "cannot read the DeepSpeed configuration"
    try:
        if text is not None:
            place = "DeepSpeed configuration string"
        elif os.path.exists(place) and not os.path.isfile(place):
            # Reading a pipe would wait for its writer.
            raise UsageError(f"{cannot}: not a regular file")
        else:
            text = Path(place).read_text(encoding="utf-8-sig")
        value = _parse(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{place}: {where}: not valid JSON: {error.msg}") from error
    except RecursionError:
        raise UsageError(f"{place}: nested more than {_MOST_LEVELS} levels deep") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: {cannot}: it is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise UsageError(f"{place}: {cannot}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{place}: expected a JSON object {{...}}, got {_show(value)}")
    return place, value


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


def _parse(text: str) -> Any:
    """Parse JSON.

    If `hjson` is installed, as it is with DeepSpeed, Hjson (comments, no quotes) is accepted too.
    """
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        try:
            import hjson  # pyright: ignore[reportMissingImports]  # not a dependency
        except ImportError:
            raise error from None
        return hjson.loads(text, object_pairs_hook=_refuse_duplicates)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{key}: given {count} times in one object; keep one of them")
    return dict(pairs)


# -- dotted keys and old names


def _rename_old(data: dict, renamed: list[tuple[str, str]]) -> dict[str, str]:
    """Give the keys of ``data`` their new names, and note the pairs in `renamed`. Returns a message
    per clash.
    """
    problems: dict[str, str] = {}
    for old, new in OLD_NAMES.items():
        section, name = find(data, old)
        if name not in section:
            continue
        value = section.pop(name)
        section, name = find(data, new)
        if name in section:
            problems[old] = f"old name of {new}, which is given too; delete {old}"
            continue
        if new.startswith("zero_optimization.offload_"):
            # It was a flag.
            if not isinstance(value, bool | None):
                problems[old] = f"expected true or false, got {value!r}"
                continue
            value = {"device": "cpu"} if value else None
        renamed.append((old, new))
        if value is not None:
            section[name] = value
    return problems


def _copied(value: Any, level: int = 0) -> Any:
    """Copy nested dicts and lists. Other values stay the same objects."""
    if level > _MOST_LEVELS:
        raise UsageError(f"DeepSpeed configuration: nested more than {_MOST_LEVELS} levels deep")
    if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:
        raise UsageError(f"DeepSpeed configuration: a number has more than {_MOST_DIGITS} digits")
    if isinstance(value, list):
        return [_copied(item, level + 1) for item in value]
    if not isinstance(value, dict):
        return value
    for key in value:
        if not isinstance(key, str):
            raise UsageError(f"DeepSpeed configuration: the key {key!r} is not a string")
    return {key: _copied(item, level + 1) for key, item in value.items()}


def _nest_dotted(data: dict, overriding: bool) -> dict[str, str]:
    """Put the value of each dotted key into its section. Returns a message per clash.

    ``overriding``: if both are given, the dotted one holds, because code wrote it later.
    """
    problems: dict[str, str] = {}
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
    return problems


def find(data: dict, dotted: str) -> tuple[dict, str]:
    """Return the dict that holds ``dotted`` and the last part of its name.

    The dict is empty if there is none.
    """
    *path, key = dotted.split(".")
    for part in path:
        data = data.get(part, {})
        if not isinstance(data, dict):
            return {}, key
    return data, key


# -- known and unknown keys


def section_of(model: type[Section], name: str) -> type[Section] | None:
    """Return the section that the key `name` of `model` holds, or None if it holds a value."""
    field = model.model_fields.get(name)
    kinds = [] if field is None else [field.annotation, *typing.get_args(field.annotation)]
    # In Python 3.10 list[int] is an instance of `type`, but not of pydantic's class of models.
    models = (kind for kind in kinds if isinstance(kind, type(Section)))
    return next((kind for kind in models if issubclass(kind, Section)), None)


def _sort(data: dict, model: type[Section], prefix: str, origin: Origin) -> dict[str, str]:
    """Note in ``origin`` what becomes of each key of a section, whose names begin with `prefix`.

    Only keys with a value for their model stay in ``data``: not those that are unknown, or that are
    "auto" and will be filled in by transformers or accelerate. Returns a message for each key that
    is misspelt.
    """
    misspelt: dict[str, str] = {}
    unknown = [name for name in data if name not in model.model_fields]
    if len(unknown) > _MOST_UNKNOWN:
        raise UsageError(
            f"{origin.place}: {prefix}{_short(unknown[0])}: unknown key, as {len(unknown) - 1} "
            "others: this is not a DeepSpeed configuration"
        )
    for name in unknown:
        del data[name]
        message = _unknown_key(prefix, name, model)
        if message is None:
            origin.ignored.append(prefix + _short(name))
        else:
            misspelt[prefix + _short(name)] = message
    for name, value in list(data.items()):
        inner = section_of(model, name)
        if isinstance(value, dict) and inner is not None:
            misspelt |= _sort(value, inner, f"{prefix}{name}.", origin)
        elif value == "auto" and _is_filled_in_or_dropped(prefix + name, model.about(name)):
            origin.auto.add(prefix + name)
            del data[name]
        else:
            origin.given.add(prefix + name)
    return misspelt


def _is_filled_in_or_dropped(key: str, about: dict[str, str]) -> bool:
    """Whether the "auto" of this key is not a value, and not a mistake."""
    return key.partition(".")[0] in _AUTO_SECTIONS or "auto" in about


def _unknown_key(prefix: str, name: str, model: type[Section]) -> str | None:
    """Return the message about an unknown key of a section, or None if it is ignored."""
    if name.lstrip("_/# ").startswith("comment"):
        return None
    if homes := _all_keys().get(name):
        return f"unknown key here; it is a valid key as {' or '.join(homes[:3])}"
    here = {key: prefix + key for key in model.model_fields}
    for old in (*OLD_NAMES, *REMOVED_KEYS):
        section, dot, key = old.rpartition(".")
        if section + dot == prefix:
            here[key] = old
    # A short name in another section may resemble this one by chance.
    elsewhere = {key: homes[0] for key, homes in _all_keys().items() if len(key) >= 8}
    for names in (here, elsewhere):
        if similar := nearest(name, names):
            return f"unknown key; did you mean {names[similar]}?"
    if model.lenient or name.startswith(_NOTES):
        return None
    similar = nearest(name, here, cutoff=0.0)
    return f"not a key of DeepSpeed 0.19; the nearest valid key is {here[similar]}"


@cache
def _all_keys() -> dict[str, list[str]]:
    """The dotted names of every key, by the last part of the name. Those within sections without
    effect are not among them.
    """
    found: dict[str, list[str]] = {}
    sections: list[tuple[str, type[Section]]] = [("", Config)]
    for prefix, model in sections:
        for name in model.model_fields:
            found.setdefault(name, []).append(prefix + name)
            inner = section_of(model, name)
            if inner is not None and not issubclass(inner, IdleSection):
                sections.append((f"{prefix}{name}.", inner))
    return found


def _short(key: str) -> str:
    return key if len(key) <= 60 else key[:57] + "..."


# -- values

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
    "less_than": "a number less than {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "literal_error": "one of {expected}",
}


def _validate(data: dict) -> tuple[Config | None, dict[str, str]]:
    """Return the typed configuration, and a message for each wrong key, which is removed from
    ``data``.

    The configuration is None if it cannot be built even without the wrong keys.
    """
    problems: dict[str, str] = {}
    try:
        return Config.model_validate(data), problems
    except ValidationError as error:
        for item in error.errors(include_url=False)[:1000]:
            key = _key_of(item)
            section, name = find(data, key)
            problems.setdefault(key, _explain(item, section.get(name, item["input"])))
    for key in problems:
        section, name = find(data, key)
        section.pop(name, None)
    with suppress(ValidationError):
        return Config.model_validate(data), problems
    return None, problems


def _key_of(error: Any) -> str:
    """Return the dotted key that one of pydantic's errors is about."""
    path: list[str] = []
    model: type[Section] | None = Config
    for part in error["loc"]:
        # Pydantic appends the branch of a union and the index of a list element: not keys of the
        # file.
        if model is None or not isinstance(part, str):
            break
        path.append(part)
        model = section_of(model, part)
    return ".".join(path)


def _explain(error: Any, given: Any) -> str:
    """Return the message for one of pydantic's errors about a value."""
    if error["type"] == "missing":
        return "is required"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if given == "auto":
        return "'auto' has no default, and nothing fills it in for this key; set a value"
    if error["type"] not in _EXPECTED:
        return f"{error['msg']}, got {_show(given)}"
    expected = _EXPECTED[error["type"]].format(**error.get("ctx", {}))
    return f"expected {expected}, got {_show(given)}"


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, default=repr)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"the string {text}" if isinstance(value, str) else text


# -- several keys at once


def _contradictions(config: Config, stage_known: bool) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, message) for keys that contradict each other."""
    fp16, zero, origin = config.fp16, config.zero_optimization, config.origin
    if fp16.enabled and config.bf16.enabled:
        yield "bf16.enabled", "fp16.enabled is true too; choose one of them"
    if fp16.enabled:
        for name, message in fp16.impossible():
            yield f"fp16.{name}", message
    if not config.managed_gradient_accumulation and zero.stage < 2 and zero.overlap_comm:
        message = (
            "false supports zero_optimization.overlap_comm only with ZeRO stage 2 or 3; below, "
            "gradients are reduced in step() alone: set overlap_comm to false"
        )
        yield "managed_gradient_accumulation", message
    for name in ("offload_param", "offload_optimizer"):
        section = getattr(zero, name)
        if section is not None and section.device == "nvme" and not section.nvme_path:
            message = "is missing, and device is nvme; name a folder on a fast disk"
            yield f"zero_optimization.{name}.nvme_path", message
    # Below stage 3 `offload_param` is not an error: accelerate's plugin writes it at every stage.
    if stage_known and zero.stage == 0 and zero.offloads_optimizer:
        message = "needs zero_optimization.stage of at least 1, got 0"
        yield "zero_optimization.offload_optimizer.device", message
    if config.optimizer is not None:
        given = _names_below("optimizer.params.", origin.given)
        yield from config.optimizer.contradictions(given)
    if config.scheduler is not None:
        given = _names_below("scheduler.params.", origin.given | origin.auto)
        yield from config.scheduler.contradictions(given)
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if (config.train_batch_size or 0) % ((micro or 1) * (steps or 1)):
        yield "train_batch_size", config.batch_mismatch()


def _names_below(section: str, keys: Collection[str]) -> set[str]:
    return {key.removeprefix(section) for key in keys if key.startswith(section)}
