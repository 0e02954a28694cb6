"""Computes what the page shows, for the template `page.html.jinja`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zero.errors import rounded, size
from zero.tools.report.runs import REST, Run

COLOURS = ("#2563eb", "#ea580c")
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
)

Columns = list[dict[str, Any]]  # of a table, one for each run: what is in the rows, by their names


def page(runs: Sequence[Run]) -> str:
    """One HTML page about one run or two."""
    keys, given = _configuration(runs)
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
        summary=[run.summary() for run in runs],
        curves=[(title, _curves(runs, key)) for key, title in titles.items()],
        time={run.name: run.time_by_part() for run in runs},
        rest=REST,
        ranks=ranks,
        memory=memory,
        collectives=[run.mean_of("bytes") for run in runs],
        links=[run.mean_of("links") for run in runs],
        keys=keys,
        given=given,
        environment=[run.facts.get("environment", {}) for run in runs],
        size=size,
        milliseconds=lambda seconds: f"{rounded(1e3 * seconds)} ms",
    )


def _curves(runs: Sequence[Run], key: str) -> str:
    """A line for each run as JSON, which the page draws: steps, and values as it names them."""
    lines = []
    for run, colour in zip(runs, COLOURS, strict=False):
        steps, values = run.curve(key)
        shown = [f"{value:.5g}" for value in values]
        line = {"name": run.name, "steps": steps, "values": shown, "resumed": run.resumed}
        lines.append(line | {"colour": colour})
    return json.dumps(lines)


def _configuration(runs: Sequence[Run]) -> tuple[Columns, Columns]:
    """All keys, and those that some run has not at their defaults."""
    rows = [run.facts.get("configuration", []) for run in runs]
    given = {row["key"] for of_run in rows for row in of_run if not row["at_default"]}
    every: Columns = [{} for _ in runs]
    for column, of_run in zip(every, rows, strict=True):
        for row in of_run:
            effect = "" if row["effect"] == "used" else f" ({row['effect']})"
            column[row["key"]] = f"{row['effective']}{effect}"
    return every, [{key: column[key] for key in column if key in given} for column in every]
