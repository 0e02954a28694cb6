"""Draws what `zero.tools.profile.memory` has sampled."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from zero.errors import size
from zero.tools.report.pictures import KINDS, pyplot

PLACES = ("device", "host", "disk")
Samples = list[dict[str, Any]]


def peaks(samples: Samples) -> dict[str, dict[str, int]]:
    """By place: the most bytes of each kind, and "all" kinds at the same moment."""
    found: dict[str, dict[str, int]] = {}
    for place in PLACES:
        held = [each["bytes"].get(place, {}) for each in samples]
        kinds = sorted({kind for each in held for kind in each})
        if kinds:
            found[place] = {kind: max(each.get(kind, 0) for each in held) for kind in kinds}
            found[place]["all"] = max(sum(each.values()) for each in held)
    return found


def draw(samples: Samples, title: str, out: Path) -> None:
    """Write the picture of one rank, in the format of the suffix: a panel for each place, an area
    for each kind.
    """
    plots, highest = pyplot(), peaks(samples)
    figure, panels = plots.subplots(
        len(highest),
        1,
        figsize=(10, 0.8 + 3.2 * len(highest)),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    times = [1000 * each["seconds"] for each in samples]
    for (place, most), axes in zip(highest.items(), panels[:, 0], strict=True):
        held = [each["bytes"].get(place, {}) for each in samples]
        shown = [kind for kind in KINDS if kind in most]
        areas = [[each.get(kind, 0) / 2**20 for each in held] for kind in shown]
        labels = [f"{kind}, at most {size(most[kind])}" for kind in shown]
        axes.stackplot(
            times,
            areas,
            labels=labels,
            colors=[KINDS[kind] for kind in shown],
            step="post",
            linewidth=0,
        )
        _mark_phases(axes, samples, times)
        axes.set_title(
            f"{place}: {size(most['all'])} at most", loc="left", fontweight="bold", pad=18
        )
        axes.set_ylabel("MiB")
        axes.set_xlim(times[0], times[-1])
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, reverse=True)
    panels[-1, 0].set_xlabel("milliseconds since the end of the step before")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(out, dpi=110)
    plots.close(figure)


def _mark_phases(axes: Any, samples: Samples, times: list[float]) -> None:
    """Name each phase above the picture, with a line where it begins."""
    for phase, group in groupby(enumerate(samples), key=lambda item: item[1]["phase"]):
        numbers = [number for number, _ in group]
        first, last = times[numbers[0]], times[min(numbers[-1] + 1, len(times) - 1)]
        if phase != "other" and last - first > 0.02 * (times[-1] - times[0]):
            axes.axvline(first, color="#6b7280", linewidth=0.7, linestyle=":")
            text = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "#4b5563"}
            axes.text((first + last) / 2, 1.01, phase, transform=axes.get_xaxis_transform(), **text)
