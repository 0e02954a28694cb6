"""Records of files and datasets, of one kind for both applications: reads them, finds their texts,
or names what is wrong."""

import csv
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import datasets
from datasets import Dataset, IterableDataset
from datasets.exceptions import DatasetsError

TEXTS, TABLES, JSON = (".txt", ".py", ".md"), (".csv", ".tsv"), (".json", ".jsonl")
KINDS = (*JSON, *TABLES, ".parquet", *TEXTS)
Value = TypeVar("Value")


class InputError(ValueError):
    """A fault in the user's input. The message names it and the remedy, in one line."""


def required(value: Value | None, argument: str) -> Value:
    """Return `value`. InputError if this command-line argument was not given."""
    if value is None:
        raise InputError(f"--{argument} is missing: give it")
    return value


@dataclass(frozen=True)
class Records:
    """The records of some files, or of a dataset. It iterates over (where, record); messages begin
    with `where`.

    Attributes: name: what messages call them. files: each with its size and time of change, by
    which a cache of what is made of them notices other contents.
    """

    name: str
    files: tuple[tuple[Path, int, int], ...] = ()
    dataset: Dataset | IterableDataset | None = None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Raises InputError: a file is not in the format that its name says, or the dataset is
        damaged.
        """
        for path, *_ in self.files:
            yield from _read_file(path, self.name if len(self.files) == 1 else str(path))
        try:
            for number, record in enumerate(self.dataset or (), start=1):
                yield f"{self.name}, record {number}", record
        except (OSError, ValueError) as error:
            raise InputError(f"{self.name}: damaged ({error})") from error


def check_name(name: str | None, argument: str) -> None:
    """Raise InputError if `name` must be a file or folder, and there is none."""
    path = Path(name or "")
    if name and not path.exists() and (name[0] in "./" or path.suffix.lower() in KINDS):
        raise InputError(f"{argument} {name}: no such file or folder")


def open_records(
    name: str,
    argument: str,
    split: str = "train",
    config: str | None = None,
    is_any_split: bool = True,
    **options: Any,
) -> Records:
    """Return the records of a file, of a folder of text files, or of a `split` of a dataset: one of
    `save_to_disk`, or one by its name with a `config` and `options` of `load_dataset`.

    `is_any_split`: whether a dataset without splits is any of them, or the training split.

    Raises:
        InputError: there is none, or the file has an unknown format. The message begins with
        `argument`.
    """
    where, path = f"{argument} {name}", Path(name)
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in TEXTS)
    if files and (path.is_dir() or path.is_file()) and path.suffix.lower() != ".parquet":
        if path.is_file() and path.suffix.lower() not in KINDS:
            raise InputError(
                f"{where}: unknown kind of file; its name must end in one of {', '.join(KINDS)}"
            )
        stats = ((each, each.stat()) for each in files)
        return Records(where, tuple((each, stat.st_size, stat.st_mtime_ns) for each, stat in stats))
    check_name(name, argument)
    try:
        if path.is_file():
            found = datasets.load_dataset("parquet", data_files=name, split="train", **options)
        else:
            try:
                found = datasets.load_from_disk(name)
            except FileNotFoundError:  # not a folder of save_to_disk
                found = datasets.load_dataset(name, config, **options)
    except (OSError, ValueError, TypeError, KeyError, DatasetsError) as error:
        cause = error.__cause__ or error
        raise InputError(f"{where}: no file, and no dataset can be loaded ({cause})") from error
    if isinstance(found, Dataset) and not is_any_split:
        found = {"train": found}
    if isinstance(found, dict):  # of `datasets`, by split
        if split not in found:
            raise InputError(f"{where} has no split {split!r}, only {', '.join(map(str, found))}")
        found = found[split]
    return Records(where, dataset=found)


def _read_file(path: Path, where: str) -> Iterator[tuple[str, Any]]:
    kind = path.suffix.lower()
    try:
        # Excel begins files with a byte order mark.
        with open(path, encoding="utf-8-sig", newline="" if kind in TABLES else None) as file:
            if kind in TEXTS:
                yield where, {"text": file.read()}
            elif kind in TABLES:
                # Excel separates by semicolons where the comma is the decimal point.
                separator = max(",;\t", key=file.readline().count)
                file.seek(0)
                reader = csv.DictReader(file, delimiter="\t" if kind == ".tsv" else separator)
                yield from ((f"{where}, line {reader.line_num}", record) for record in reader)
            else:
                yield from _read_json(file, where, kind == ".json")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8"
        ) from None
    except csv.Error as error:
        raise InputError(f"{where}: not valid CSV ({error})") from None


def _read_json(file: TextIO, where: str, may_be_array: bool) -> Iterator[tuple[str, Any]]:
    is_array = may_be_array and file.read(64).lstrip().startswith("[")
    file.seek(0)
    number = 0
    try:
        if is_array:
            records = enumerate(json.load(file), start=1)
            yield from ((f"{where}, record {number}", record) for number, record in records)
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{where}, line {number}", json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}, line {number or error.lineno}: not valid JSON ({error.msg} at column "
            f"{error.colno}); a file has one array, or one record in each line"
        ) from None


def text_of(record: object, where: str, argument: str, column: str) -> str:
    """Return the text of a record, flat or under "translation". `column` may be a language with a
    region (en_XX for en), and has a dot where a column holds others: translation.en.

    Raises:
        InputError: there is none. The message begins with `where`, and names `argument`.
    """
    if not isinstance(record, Mapping):
        raise InputError(
            f'{where}: a record must be an object such as {{"translation": {{"en": "...", "de": '
            f'"..."}}}}'
        )
    value: Any = record
    if isinstance(record.get("translation"), Mapping) and column.split(".")[0] not in record:
        value = record["translation"]
    for key in column.split("."):
        columns = value if isinstance(value, Mapping) else {}
        if key not in columns and key.split("_")[0] in columns:
            key = key.split("_")[0]
        if key not in columns:
            raise InputError(
                f"{where}: there is no column {key!r} for {argument}; the columns are "
                f"{', '.join(map(str, columns))}"
            )
        value = columns[key]
    if not isinstance(value, str):
        raise InputError(
            f"{where}: the text for {argument} ({key!r}) is {value!r:.40}; it must be a string"
        )
    return value


def read_pairs(
    records: Records, languages: Mapping[str, str], limit: int | None = None
) -> Iterator[dict[str, str]]:
    """Yield the texts of the first `limit` records (None: all) in two `languages`, which have the
    keys "source" and "target".

    Raises:
        InputError: there is no record, or one does not have a text in both languages.
    """
    where = None
    for where, record in itertools.islice(records, limit):
        yield {
            side: text_of(record, where, f"--{side}_lang", language)
            for side, language in languages.items()
        }
    if where is None:
        raise InputError(f"{records.name}: it is empty; give at least one pair of sentences")
