"""Pictures for the page, as inline SVG made by matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from zero.errors import UsageError
from zero.tools.report.runs import REST, Run, size

COLOURS = ("#2563eb", "#ea580c")
# Of a step's parts: what is computed in blue, what is waited for in warm colours.
_PARTS = {"forward": "#1d4ed8", "backward": "#3b82f6", "step": "#93c5fd", REST: "#cbd5e1"}
_WAITS = ("#f97316", "#dc2626", "#facc15", "#a21caf", "#7c2d12", "#65a30d")
KINDS = {
    "parameters": "#1d4ed8", "gathered parameters": "#60a5fa", "gradients": "#f97316",
    "optimizer": "#16a34a",
    "activations": "#a855f7", "buffers": "#94a3b8",
}  # fmt: skip
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "zero", "font.family": "sans-serif", "font.size": 9,
    "axes.grid": True,
    "grid.color": "#e5e7eb", "axes.edgecolor": "#9ca3af", "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True, "legend.frameon": False,
}  # fmt: skip


def pyplot() -> Any:
    """matplotlib's pyplot, which draws to files. Raises UsageError where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("this command needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update(_STYLE)
    return pyplot


def svg(figure: Any) -> str:
    """The figure as an SVG element, without a header and without names that nothing refers to."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot().close(figure)
    text = re.sub(
        r"<metadata>.*?</metadata>",
        "",
        out.getvalue()[out.getvalue().index("<svg") :],
        flags=re.DOTALL,
    )
    used = set(re.findall(r"#([\w-]+)", text))
    return re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else "", text)


def curves(
    runs: Sequence[Run],
    title: str,
    points: Sequence[tuple[list[int], list[float]]],
    group: str = "",
) -> str:
    """A line for each run; `points`: steps and values of each."""
    figure, axes = pyplot().subplots(figsize=(5.2, 2.6), layout="constrained")
    for run, colour, line, (steps, values) in zip(runs, COLOURS, ("-", "--"), points, strict=False):
        marker = "o" if len(steps) < 3 else None
        axes.plot(steps, values, line, color=colour, linewidth=1.4, marker=marker, label=run.name)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(group)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    if not any(values for _, values in points):
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color="#6b7280")
    return svg(figure)


def stacked(
    names: Sequence[str], bars: Sequence[dict[str, float]], colours: dict[str, str], group: str
) -> str:
    """A horizontal bar for each name, of parts with these colours.

    Parts that are nowhere above 0 are left out.
    """
    figure, axes = pyplot().subplots(figsize=(10.6, 1.0 + 0.35 * len(bars)), layout="constrained")
    lefts = [0.0] * len(bars)
    for part, colour in colours.items():
        values = [bar.get(part, 0.0) for bar in bars]
        if any(values):
            axes.barh(range(len(bars)), values, left=lefts, height=0.6, color=colour, label=part)
            lefts = [left + value for left, value in zip(lefts, values, strict=True)]
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.set_xlabel(group)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=9, handlelength=1, fontsize=8)
    return svg(figure)


def where_time_goes(runs: Sequence[Run]) -> str:
    bars = [run.time_by_part() for run in runs]
    waits = sorted({part for bar in bars for part in bar if part.startswith("wait")})
    colours = _PARTS | {part: _WAITS[number % len(_WAITS)] for number, part in enumerate(waits)}
    return stacked([run.name for run in runs], bars, colours, "seconds of a step on rank 0")


def memory(runs: Sequence[Run]) -> str:
    """Bytes that rank 0 holds after its first step, by kind; a bar for each run and place."""
    names, bars = [], []
    for run in runs:
        for place, kinds in run.facts.get("memory", {}).items():
            names.append(f"{run.name}, {place}")
            bars.append({kind: nbytes / 2**20 for kind, nbytes in kinds.items()})
    return stacked(names, bars, KINDS, "MiB on rank 0") if bars else ""


def grouped(
    runs: Sequence[Run], values: Sequence[dict[str, float]], group: str, shows: Any = size
) -> str:
    """For each name one horizontal bar of each run, with its value beside it."""
    names = list(dict.fromkeys(name for each in values for name in each))
    if not names:
        return ""
    figure, axes = pyplot().subplots(
        figsize=(10.6, 0.9 + 0.3 * len(names) * len(runs)), layout="constrained"
    )
    height = 0.8 / len(runs)
    for number, (run, colour, each) in enumerate(zip(runs, COLOURS, values, strict=False)):
        places = [place + number * height for place in range(len(names))]
        bars = axes.barh(
            places,
            [each.get(name, 0.0) for name in names],
            height=height,
            color=colour,
            label=run.name,
        )
        axes.bar_label(bars, [shows(each.get(name, 0.0)) for name in names], padding=3, fontsize=8)
    axes.set_yticks([place + height * (len(runs) - 1) / 2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlabel(group)
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    return svg(figure)
