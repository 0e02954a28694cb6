"""Computes what the page shows, for the template `page.html.jinja`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zero.errors import rounded, size
from zero.tools.report.runs import REST, Run

COLOURS = ("#2563eb", "#ea580c")
# Of a step's parts: what is computed in blue, what is waited for in warm colours.
_PARTS = {"forward": "#1d4ed8", "backward": "#3b82f6", "step": "#93c5fd", REST: "#cbd5e1"}
_WAITS = ("#f97316", "#dc2626", "#facc15", "#a21caf", "#7c2d12", "#65a30d")
KINDS = {
    "parameters": "#1d4ed8",
    "gathered parameters": "#60a5fa",
    "gradients": "#f97316",
    "optimizer": "#16a34a",
    "buffers": "#94a3b8",
}
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
)


def page(runs: Sequence[Run]) -> str:
    """One HTML page about one run or two."""
    keys, given = _configuration(runs)
    names, times = [run.name for run in runs], [run.time_by_part() for run in runs]
    milliseconds = [{part: _milliseconds(spent) for part, spent in of.items()} for of in times]
    waits = sorted({part for of in times for part in of} - _PARTS.keys())
    colours = _PARTS | {part: _WAITS[number % len(_WAITS)] for number, part in enumerate(waits)}
    memory = {
        f"{run.name}, {place}": kinds
        for run in runs
        for place, kinds in run.facts.get("memory", {}).items()
    }
    titles = {"loss": "Loss", "lr": "Learning rate", "grad_norm": "Norm of the gradient"}
    titles |= {name: name for run in runs for name in run.metrics()}
    titles["duration"] = "Time of a step, seconds"
    ranks = [
        {f"rank {rank}": f"{rounded(spent)} s" for rank, spent in run.seconds_by_rank()}
        for run in runs
    ]
    return _TEMPLATES.get_template("page.html.jinja").render(
        runs=runs,
        colours=COLOURS,
        summary=_rows([run.summary() for run in runs], marks=False),
        curves=[(title, _curves(runs, key)) for key, title in titles.items()],
        time=_bars(dict(zip(names, times, strict=True)), colours, _milliseconds),
        times=_rows(milliseconds, marks=False),
        ranks=_rows(ranks, marks=False),
        memory=_bars(memory, KINDS, size),
        collectives=_sizes(runs, "bytes"),
        links=_sizes(runs, "links"),
        keys=keys,
        given=given,
        environment=_rows([run.facts.get("environment", {}) for run in runs]),
    )


def _milliseconds(seconds: float) -> str:
    return f"{rounded(1e3 * seconds)} ms"


def _curves(runs: Sequence[Run], key: str) -> str:
    """A line for each run as JSON, which the page draws: steps, and values as it names them."""
    lines = []
    for run, colour in zip(runs, COLOURS, strict=False):
        steps, values = run.curve(key)
        shown = [f"{value:.5g}" for value in values]
        line = {"name": run.name, "steps": steps, "values": shown, "resumed": run.resumed}
        lines.append(line | {"colour": colour})
    return json.dumps(lines)


def _bars(
    bars: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    words: Callable[[Any], str],
) -> list[tuple[str, list[tuple[str, str, str, float]]]]:
    """Bars of parts, by name: what each part is, its value in words, its colour, and its length in
    percent of the longest bar. Parts without a colour are left out.
    """
    known = {
        name: [(part, bar[part]) for part in colours if bar.get(part)] for name, bar in bars.items()
    }
    most = max((sum(value for _, value in parts) for parts in known.values()), default=0.0)
    return [
        (name, [(part, words(each), colours[part], 100 * each / most) for part, each in parts])
        for name, parts in known.items()
    ]


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
