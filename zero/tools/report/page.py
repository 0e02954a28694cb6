"""Computes what the page shows, for the template `page.html.jinja`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zero.errors import rounded, size
from zero.tools.report import pictures
from zero.tools.report.runs import Run

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
)


def page(runs: Sequence[Run]) -> str:
    """One HTML page about one run or two."""
    keys, given = _configuration(runs)
    times = [run.time_by_part() for run in runs]
    milliseconds = [
        {part: f"{rounded(1e3 * spent)} ms" for part, spent in of.items()} for of in times
    ]
    titles = {"loss": "Loss", "lr": "Learning rate", "grad_norm": "Norm of the gradient"}
    titles |= {name: name for run in runs for name in run.metrics()}
    curves = [
        pictures.curves(runs, title, [run.curve(key) for run in runs])
        for key, title in titles.items()
    ]
    durations = [run.curve("duration") for run in runs]
    ranks = [
        {f"rank {rank}": f"{rounded(spent)} s" for rank, spent in run.seconds_by_rank()}
        for run in runs
    ]
    return _TEMPLATES.get_template("page.html.jinja").render(
        runs=runs,
        colours=pictures.COLOURS,
        summary=_rows([run.summary() for run in runs], marks=False),
        curves=[*curves, pictures.curves(runs, "Time of a step", durations, "seconds")],
        time=pictures.where_time_goes(runs, times),
        times=_rows(milliseconds, marks=False),
        ranks=_rows(ranks, marks=False),
        memory=pictures.memory(runs),
        collectives=_sizes(runs, "bytes"),
        links=_sizes(runs, "links"),
        keys=keys,
        given=given,
        environment=_rows([run.facts.get("environment", {}) for run in runs]),
    )


def _sizes(runs: Sequence[Run], key: str) -> list[tuple[str, list[Any], bool]]:
    """A row for each name: mean bytes of a step on rank 0."""
    columns = [{name: size(nbytes) for name, nbytes in run.mean_of(key).items()} for run in runs]
    return _rows(columns, marks=False)


def _rows(
    columns: Sequence[Mapping[str, Any]], marks: bool = True
) -> list[tuple[str, list[Any], bool]]:
    """A row for each key of the columns: the key, its values, and whether runs differ in it."""
    rows = []
    for key in dict.fromkeys(key for column in columns for key in column):
        values = [column.get(key, "-") for column in columns]
        rows.append((key, values, marks and any(value != values[0] for value in values)))
    return rows


def _configuration(runs: Sequence[Run]) -> tuple[list, list]:
    """Rows of all keys, and of those that some run has not at their defaults."""
    columns: list[dict[str, str]] = [{} for _ in runs]
    given = set()
    for run, column in zip(runs, columns, strict=True):
        for row in run.facts.get("configuration", []):
            effect = "" if row["effect"] == "used" else f" ({row['effect']})"
            column[row["key"]] = f"{row['effective']}{effect}"
            if not row["at_default"]:
                given.add(row["key"])
    rows = _rows(columns)
    return rows, [row for row in rows if row[0] in given]
