"""The page: sections of HTML around the pictures. Everything that comes from a run is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from zero.tools.report import pictures
from zero.tools.report.runs import Run

_CSS = """
body{margin:0;background:#f3f4f6;color:#111827;font:14px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:24px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:0 0 10px}
p{margin:4px 0 10px;color:#4b5563}
section{background:#fff;border:1px solid #e5e7eb;border-radius:10px;padding:18px 20px;margin:16px 0}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:14px}
svg{max-width:100%;height:auto}
table{border-collapse:collapse;width:100%;table-layout:fixed}
th,td{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid #e5e7eb;
vertical-align:top;overflow-wrap:anywhere}th{color:#6b7280;font-weight:600}
tr.differs td{background:#fef3c7}
td:first-child,th:first-child{width:36%;color:#374151}
.chip{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
code{font-size:13px}details{margin-top:10px}summary{cursor:pointer;color:#2563eb}
"""


def page(runs: Sequence[Run]) -> str:
    """One HTML page about one run or two."""
    title = " and ".join(escape(run.name) for run in runs)
    sections = "".join(
        f"<section><h2>{name}</h2>{body}</section>\n" for name, body in _sections(runs) if body
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" '
        'href="data:,">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_CSS}</style></head>\n<body><main><h1>{title}</h1>\n{sections}</main></body></html>\n"
    )


def _sections(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    yield "Summary", _table(runs, [run.summary() for run in runs], marks=False)
    charts = [
        ("Loss", "loss", ""),
        ("Learning rate", "lr", ""),
        ("Norm of the gradient", "grad_norm", ""),
    ]
    drawn = [
        pictures.curves(runs, title, [run.curve(key) for run in runs], group)
        for title, key, group in charts
    ]
    drawn.append(
        pictures.curves(runs, "Time of a step", [run.step_seconds() for run in runs], "seconds")
    )
    yield "Training", f'<div class="grid">{"".join(f"<div>{each}</div>" for each in drawn)}</div>'
    text = (
        "<p>Means over all steps but the first. A wait is time in which rank 0 computed "
        "nothing.</p>"
    )
    yield "Where a step's time goes", text + pictures.where_time_goes(runs) + _waits(runs)
    yield (
        "Ranks",
        "<p>Mean seconds of a step in which each rank worked. Others wait for the slowest.</p>"
        + _ranks(runs),
    )
    text = (
        "<p>What the engine holds after the first step. Activations and torch itself come on "
        "top.</p>"
    )
    drawn = pictures.memory(runs)
    yield "Memory by kind", drawn and text + drawn
    traffic = pictures.grouped(
        runs, [run.bytes_by_collective() for run in runs], "bytes of a step on rank 0"
    )
    yield (
        "Communication",
        traffic and "<p>Sizes of the full buffers that collectives fill or reduce.</p>" + traffic,
    )
    links = pictures.grouped(
        runs, [run.bytes_by_link() for run in runs], "bytes of a step on rank 0"
    )
    yield "Bytes by link", links and "<p>What rank 0 sends, copies, reads and writes.</p>" + links
    yield "Effective configuration", _configuration(runs)
    yield "Environment", _table(runs, [run.facts.get("environment", {}) for run in runs])
    yield "Warnings", "".join(map(_warnings, runs))


def _head(runs: Sequence[Run]) -> str:
    chips = zip(runs, pictures.COLOURS, strict=False)
    cells = (
        f'<th><span class="chip" style="background:{colour}"></span>{escape(run.name)}</th>'
        for run, colour in chips
    )
    return f"<tr><th></th>{''.join(cells)}</tr>"


def _table(runs: Sequence[Run], columns: Sequence[dict[str, str]], marks: bool = True) -> str:
    """A row for each key of the columns. Rows in which runs differ are marked."""
    keys = list(dict.fromkeys(key for column in columns for key in column))
    if not keys:
        return ""
    rows = [_head(runs)]
    for key in keys:
        values = [column.get(key, "-") for column in columns]
        mark = ' class="differs"' if marks and len(set(values)) > 1 else ""
        rows.append(
            f"<tr{mark}><td>{escape(key)}</td>"
            + "".join(f"<td>{escape(value)}</td>" for value in values)
            + "</tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _waits(runs: Sequence[Run]) -> str:
    columns = [
        {part: f"{1000 * spent:.2f} ms" for part, spent in run.time_by_part().items()}
        for run in runs
    ]
    return _table(runs, columns, marks=False)


def _ranks(runs: Sequence[Run]) -> str:
    values = [
        {f"rank {rank}": spent for rank, spent in enumerate(run.seconds_by_rank())} for run in runs
    ]
    return pictures.grouped(runs, values, "seconds", lambda seconds: f"{seconds:.4f}")


def _configuration(runs: Sequence[Run]) -> str:
    rows = [run.facts.get("configuration", []) for run in runs]
    everything = [
        {
            row["key"]: row["effective"]
            + ("" if row["effect"] == "used" else f" ({row['effect']})")
            for row in each
        }
        for each in rows
    ]
    given = {row["key"] for each in rows for row in each if not row["at_default"]}
    shown = [{key: value for key, value in each.items() if key in given} for each in everything]
    if not given:
        return ""
    hidden = f"<details><summary>all keys</summary>{_table(runs, everything)}</details>"
    return "<p>Keys that are not at their defaults.</p>" + _table(runs, shown) + hidden


def _warnings(run: Run) -> str:
    lines = "".join(
        f"<li>step {escape(str(step))}: <code>{escape(text)}</code></li>"
        for step, text in run.warnings
    )
    return f"<p>{escape(run.name)}</p>" + (f"<ul>{lines}</ul>" if lines else "<p>none</p>")
