"""What an experiment of `benchmarks.reproduce` is, and helpers for its commands, tables and
pictures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Commands = list[list[str]]


class Sizes(NamedTuple):
    """Where an experiment writes, whether it is to be short, and a folder on a fast disk for what
    is offloaded.
    """

    folder: Path
    quick: bool
    disk: Path | None


class Table(NamedTuple):
    caption: str
    columns: list[str]
    rows: list[list[Any]]


class Experiment(NamedTuple):
    """`collect` gets the experiment's folder and the output files of its commands.

    It may draw pictures there.
    """

    name: str
    title: str
    text: str
    commands: Callable[[Sizes], Commands]
    collect: Callable[[Path, list[Path]], list[Table]]


def module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]


def torchrun(ranks: int, *arguments: object) -> list[str]:
    return module("torch.distributed.run", "--standalone", "--nproc_per_node", ranks, *arguments)


def benchmark(name: str, quick: list[object], full: list[object]) -> Callable[[Sizes], Commands]:
    """One command, `python -m benchmarks.NAME`, with other arguments for a short run."""

    def commands(sizes: Sizes) -> Commands:
        arguments = quick if sizes.quick else full
        output = sizes.folder / f"{name.rpartition('.')[2]}.json"
        return [module(f"benchmarks.{name}", *arguments, "--output", output)]

    return commands


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def percent(part: float) -> str:
    return f"{round(part, 2) + 0.0:.0%}"  # no "-0%"


def chosen(caption: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> Table:
    """A table of some entries of each row: `columns` has their titles by key."""
    return Table(
        caption, list(columns.values()), [[row.get(key) for key in columns] for row in rows]
    )


def curves(
    path: Path, title: str, axes: tuple[str, str], lines: dict[str, tuple[list[float], list[float]]]
) -> None:
    """Draw lines of (x, y) by their names.

    Later ones are thinner, because equal ones lie on each other.
    """
    import matplotlib  # imported here, so that the list of experiments needs no matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, (name, (x, y)) in enumerate(lines.items()):
        axis.plot(x, y, marker=".", linewidth=max(1, 5 - number), label=name)
    axis.set(xlabel=axes[0], ylabel=axes[1], title=title)
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
