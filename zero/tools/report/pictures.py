"""Pictures for the page, as inline SVG made by matplotlib."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero.errors import UsageError
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


def pyplot() -> Any:
    """matplotlib's pyplot, which draws to files. Raises UsageError where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("this command needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = Path(__file__).with_name("pictures.mplstyle")
    matplotlib.rc_file(style, use_default_template=False)
    return pyplot


def _svg(figure: Any) -> str:
    """The figure as an SVG element, without a header."""
    out = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(out, format="svg", transparent=True, metadata=no_metadata)
    pyplot().close(figure)
    return out.getvalue()[out.getvalue().index("<svg") :]


def curves(
    runs: Sequence[Run],
    title: str,
    points: Sequence[tuple[list[int], list[float]]],
    unit: str = "",
) -> tuple[str, str]:
    """A line for each run; `points`: steps and values of each. Returns the picture, and as JSON
    where its axes are in it and what they show, with which the page names values.
    """
    figure, axes = pyplot().subplots(figsize=(5.2, 2.6), layout="constrained")
    for run, colour, line, (steps, values) in zip(runs, COLOURS, ("-", "--"), points, strict=False):
        marker = "o" if len(steps) < 3 else None
        axes.plot(steps, values, line, color=colour, linewidth=1.4, marker=marker, label=run.name)
        for step in run.resumed:
            axes.axvline(step, color=colour, linewidth=0.8, linestyle=":")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set(xlabel="step", ylabel=unit)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    if not any(values for _, values in points):
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color="#6b7280")
    picture = _svg(figure)  # this lays the axes out
    place = axes.get_position()
    lines = [
        {"name": run.name, "steps": steps, "values": [f"{value:.5g}" for value in values]}
        for run, (steps, values) in zip(runs, points, strict=False)
    ]
    shown = {"left": place.x0, "right": place.x1, "steps": axes.get_xlim(), "lines": lines}
    return picture, json.dumps(shown)


def _stacked(
    names: Sequence[str],
    bars: Sequence[Mapping[str, float]],
    colours: Mapping[str, str],
    unit: str,
) -> str:
    """A bar for each name, of parts with these colours.

    Parts that are nowhere above 0 are left out.
    """
    size = 10.6, 1.0 + 0.35 * len(bars)
    figure, axes = pyplot().subplots(figsize=size, layout="constrained")
    places = list(range(len(names)))
    axes.set_yticks(places, names)
    axes.set_xlabel(unit)
    axes.grid(axis="y", visible=False)
    lefts = [0.0] * len(bars)
    for part, colour in colours.items():
        values = [bar.get(part, 0.0) for bar in bars]
        if any(values):
            axes.barh(places, values, left=lefts, height=0.6, color=colour, label=part)
            lefts = [left + value for left, value in zip(lefts, values, strict=True)]
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=9, handlelength=1, fontsize=8)
    return _svg(figure)


def where_time_goes(runs: Sequence[Run], times: Sequence[Mapping[str, float]]) -> str:
    """`times`: seconds of a step by part."""
    waits = sorted({part for bar in times for part in bar if part.startswith("wait")})
    colours = _PARTS | {part: _WAITS[number % len(_WAITS)] for number, part in enumerate(waits)}
    return _stacked([run.name for run in runs], times, colours, "seconds of a step on rank 0")


def memory(runs: Sequence[Run]) -> str:
    """Bytes that rank 0 holds after its first step, by kind; a bar for each run and place."""
    bars = {
        f"{run.name}, {place}": {kind: nbytes / 2**20 for kind, nbytes in kinds.items()}
        for run in runs
        for place, kinds in run.facts.get("memory", {}).items()
    }
    return _stacked(list(bars), list(bars.values()), KINDS, "MiB on rank 0") if bars else ""
