"""Writes the numbers of each step to CSV files, TensorBoard, Weights & Biases, JSON lines or the
terminal.

A writer gets a record: numbers by name, or by name in groups. It does not know how they were
measured."""

from __future__ import annotations

import csv
import importlib
import json
import math
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zero.config import Config
from zero.errors import UsageError

Record = dict[str, Any]


def writers(settings: Config) -> list[Writer]:
    """The writers that the configuration asks for.

    Raises UsageError if one's package is missing, or a folder cannot be written to.
    """
    found: list[Writer] = []
    of_folder = {"csv_monitor": CsvFiles, "json_monitor": JsonLines, "tensorboard": TensorBoard}
    for name, kind in of_folder.items():
        if (section := getattr(settings, name)).enabled:
            found.append(kind(_folder(name, section)))
    if settings.wandb.enabled:
        found.append(Wandb(settings.wandb))
    every = settings.steps_per_print or math.inf
    if math.isfinite(every):
        found.append(Terminal(every))
    return found


def _folder(name: str, section: Any) -> Path:
    folder = Path(section.output_path, section.job_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{name}.output_path: cannot write to {folder}: {error.strerror}"
        ) from None
    return folder


def events(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers under DeepSpeed's names, or under similar ones."""
    for key, value in record.items():
        if key in ("step", "samples", "skipped", "ranks", "run", "warnings"):
            continue
        name = {"loss": "train_loss"}.get(key, key)
        if isinstance(value, dict):
            yield from (
                (f"Train/{key.capitalize()}/{inner}", number) for inner, number in value.items()
            )
        elif value is not None:
            yield f"Train/Samples/{name}", value


class EventWriter(ABC):
    """Writes each number of a record as an event of its own."""

    def write(self, record: Record) -> None:
        self.write_events(events(record), record["samples"])

    @abstractmethod
    def write_events(self, pairs: Iterable[tuple[str, float]], samples: int) -> None:
        """Write names and numbers, measured after so many samples."""


class CsvFiles(EventWriter):
    """One file for each quantity, as DeepSpeed writes them; the step of a row is the number of
    samples so far.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def write_events(self, pairs: Iterable[tuple[str, float]], samples: int) -> None:
        for name, value in pairs:
            file = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with file.open("a", newline="") as out:
                rows = csv.writer(out)
                if out.tell() == 0:  # a run that is resumed adds to the file
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])


class JsonLines:
    """Writes `steps.jsonl`, with one record per line.

    A run that is resumed appends to the file. The first record after each start has "run".
    """

    def __init__(self, folder: Path):
        self._file = folder / "steps.jsonl"

    def write(self, record: Record) -> None:
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")


class TensorBoard(EventWriter):
    def __init__(self, folder: Path):
        module = _imported("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(folder))

    def write_events(self, pairs: Iterable[tuple[str, float]], samples: int) -> None:
        for name, value in pairs:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()


class Wandb(EventWriter):
    def __init__(self, section: Any):
        self._wandb = _imported("wandb", "wandb")
        self._wandb.init(project=section.project, group=section.group, entity=section.team)

    def write_events(self, pairs: Iterable[tuple[str, float]], samples: int) -> None:
        self._wandb.log(dict(pairs), step=samples)


_PARTS = (
    ("step", "step {}"), ("loss", "loss {:.4g}"), ("grad_norm", "norm {:.3g}"), ("lr", "lr {:.3g}"),
    ("samples_per_second", "{:.4g} samples/s"), ("tokens_per_second", "{:.4g} tokens/s"), ("mfu",
    "MFU {:.1%}"),
)  # fmt: skip


class Terminal:
    """A line on stderr, every `every` steps. A number that is not finite is left out."""

    def __init__(self, every: float):
        self._every = every

    def write(self, record: Record) -> None:
        if record["step"] % self._every:
            return
        parts = [text.format(record[key]) for key, text in _PARTS if record.get(key) is not None]
        print(", ".join(parts), file=sys.stderr, flush=True)


Writer = EventWriter | JsonLines | Terminal


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"{package}.enabled is true, but the package {package} is missing: install it, or set "
            "it to false"
        ) from None
