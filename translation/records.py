"""Records of parallel text in files: finds the two languages, or names what is wrong."""

import csv
import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv"}
CHECKED_RECORDS = 1000
Value = TypeVar("Value")


class InputError(ValueError):
    """A fault in the user's input. The message names it and the remedy, in one line."""


def required(value: Value | None, argument: str) -> Value:
    """Return `value`. InputError if this command-line argument was not given."""
    if value is None:
        raise InputError(f"--{argument} is missing: give it")
    return value


def delimiter(path: str) -> str:
    """Return the column separator of a .csv or .tsv file."""
    return "\t" if Path(path).suffix.lower() == ".tsv" else ","


def column_names(path: str) -> list[str]:
    """Return the columns that the first line of a .csv or .tsv file names."""
    with open(path, encoding="utf-8", newline="") as file:
        return next(csv.reader(file, delimiter=delimiter(path)))


def check_data_file(
    path: str,
    argument: str,
    languages: Mapping[str, str | None],
    limit: int | None = CHECKED_RECORDS,
) -> None:
    """Check that the first `limit` records (None: all) of a file hold text in all `languages`.

    `argument`: the command-line argument that names the file. `languages`: the values of
    `--source_lang` and `--target_lang` by argument, None if not given.

    Raises:
        InputError: the file is missing, empty or of another format, or a record does not have the
        languages.
    """
    where = f"{argument} {path}"
    if not Path(path).is_file():
        raise InputError(f"{where}: no such file")
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(
            f"{where}: unknown kind of file; its name must end in one of {', '.join(FORMATS)}"
        )
    count = 0
    try:
        for line, record in read_records(path):
            count += 1
            check_record(record, f"{where}, line {line}", languages)
            if count == limit:
                break
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8"
        ) from None
    except csv.Error as error:
        raise InputError(f"{where}, record {count + 1}: not valid CSV ({error})") from None
    if not count:
        raise InputError(
            f"{where}: the file is empty; give a file with at least one pair of sentences"
        )


def read_records(path: str) -> Iterator[tuple[int, dict]]:
    """Yield (line number, record) for each line of a JSON-lines, CSV or TSV file.

    InputError for a syntax error.
    """
    with open(path, encoding="utf-8", newline="") as file:
        if FORMATS[Path(path).suffix.lower()] == "csv":
            reader = csv.DictReader(file, delimiter=delimiter(path))
            yield from ((reader.line_num, record) for record in reader)
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno});"
                    f" each line must be one record"
                ) from None


def check_record(record: object, where: str, languages: Mapping[str, str | None]) -> None:
    """Check that one record, flat or under "translation", holds text in all languages.

    `where` begins the message.
    """
    texts = record.get("translation", record) if isinstance(record, Mapping) else record
    if not isinstance(texts, Mapping):
        raise InputError(
            f'{where}: a record must be an object such as {{"translation": {{"en": "...", "de": '
            f'"..."}}}}'
        )
    found = ", ".join(str(key) for key in texts)
    for argument, language in languages.items():
        if not language:
            raise InputError(
                f"{argument} is missing: name one of the languages of {where}, which are {found}"
            )
        if (key := language_key(language, texts)) not in texts:
            raise InputError(
                f"{where}: there is no column {key!r} for {argument}; the columns are {found}"
            )
        if not isinstance(texts[key], str):
            raise InputError(
                f"{where}: the text for {argument} ({key!r}) is {texts[key]!r}; it must be a string"
            )


def language_key(language: str, columns: Container[str]) -> str:
    """Return the column of a language: its name, or the part before "_" (multilingual models write
    en_XX for en).
    """
    return language if language in columns else language.split("_")[0]
