"""The demonstration's report: a table, a plot, completions, and the figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot


@dataclass
class Result:
    """Held-out figures of one model.

    `eval_loss`: nats per token. `curve`: (step, held-out loss).
    """

    eval_loss: float
    eval_ppl: float
    parameters: int
    tokens_per_second: float
    top1_agreement: float | None = None
    step: int | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)


TITLES = {
    "teacher": "teacher",
    "baseline": "student, cross-entropy only, last",
    "baseline_best": "student, cross-entropy only, best",
    "distilled": "student, distilled",
}


def table(results: Mapping[str, Result]) -> str:
    """Return the results as a Markdown table."""
    head = [
        "model",
        "parameters",
        "steps",
        "held-out loss",
        "perplexity",
        "agrees with teacher",
        "tokens/s",
    ]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name, result in results.items():
        agreement = "" if result.top1_agreement is None else f"{result.top1_agreement:.1%}"
        rows.append(
            [
                TITLES[name], f"{result.parameters:,}", str(result.step), f"{result.eval_loss:.3f}",
                f"{result.eval_ppl:.1f}", agreement, f"{result.tokens_per_second:,.0f}",
            ]
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def plot(results: Mapping[str, Result], path: Path) -> None:
    """Plot the held-out loss of both students over the steps, and the teacher's as a line."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for name in ("baseline", "distilled"):
        steps, losses = zip(*results[name].curve, strict=True)
        axes.plot(
            steps, losses, marker="o", markersize=3, label=TITLES[name].removesuffix(", last")
        )
    axes.axhline(results["teacher"].eval_loss, color="grey", linestyle="--", label="teacher")
    axes.set(xlabel="optimizer steps", ylabel="held-out loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(
    folder: str,
    results: Mapping[str, Result],
    prompt: str,
    completions: Mapping[str, str],
    notes: Sequence[str],
) -> str:
    """Write `report.json`, `report.md` and `held_out_loss.png` to `folder`.

    Return the table and a summary.
    """
    out = Path(folder)
    text = table(results)
    gain = results["baseline"].eval_loss - results["distilled"].eval_loss
    against_best = results["baseline_best"].eval_loss - results["distilled"].eval_loss
    summary = (
        f"With the same data and steps the distilled student is {gain:.3f} nats per token better "
        "than the one trained"
        f" by cross-entropy, and {against_best:.3f} better than the best of its checkpoints."
    )
    figures = {name: asdict(result) for name, result in results.items()}
    out.joinpath("report.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    plot(results, out / "held_out_loss.png")
    lines = [
        "# Distillation: what the teacher adds",
        "",
        text,
        "",
        summary,
        "",
        "![held-out loss](held_out_loss.png)",
    ]
    lines += ["", *(f"- {note}" for note in notes), "", "## A completion (greedy)", ""]
    for name, completion in {"prompt": prompt, **completions}.items():
        lines += [f"{name}:", "", "```python", completion, "```", ""]
    out.joinpath("report.md").write_text("\n".join(lines), encoding="utf-8")
    return f"{text}\n\n{summary}"
