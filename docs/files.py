"""The table and the picture of `results.md` on offload to files, from what was measured."""

from __future__ import annotations

from collections.abc import Iterator

# `python -m benchmarks.offload --model MODEL --deepspeed-python PYTHON`: seconds of a step.
FILES, FLOOR = "zero, all in files", "plain torch, forward and backward"
MEASURED: dict[str, dict[str, float]] = {
    "60.5 million": {
        FLOOR: 0.561,
        "the disk's own limit": 0.263,
        "zero, all in host memory": 0.635,
        FILES: 0.731,
        "the same, 8-bit moments": 0.671,
        "DeepSpeed, all in host memory": 1.125,
        "DeepSpeed, all in files": 2.100,
    },
    "256 million": {
        FLOOR: 1.783,
        "the disk's own limit": 1.108,
        "zero, all in host memory": 1.832,
        FILES: 2.684,
        "the same, 8-bit moments": 2.716,
        "DeepSpeed, all in host memory": 5.179,
        "DeepSpeed, all in files": 6.918,
    },
    "1.0 billion": {
        FLOOR: 7.719,
        "the disk's own limit": 4.485,
        "zero, all in host memory": 11.00,
        FILES: 14.62,
        "the same, 8-bit moments": 13.42,
    },
}
COLOURS = ("#bbb", "#ddd", "#9ecae1", "#3182bd", "#6baed6", "#fdd0a2", "#e6550d")
LEFT, WIDTH, BAR = 250, 420, 20


def table() -> str:
    """Return the seconds of each variant, and their ratio to zero's in files."""
    lines = [f"| seconds of a step | {' | '.join(MEASURED)} |", "|---" * (len(MEASURED) + 1) + "|"]
    for name in next(iter(MEASURED.values())):
        cells = []
        for found in MEASURED.values():
            ratio = f"{found[name]:.3g} ({found[name] / found[FILES]:.2f})" if name in found else ""
            cells.append(ratio or "not run")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _drawn() -> Iterator[str]:
    y = 10.0
    for size, found in MEASURED.items():
        yield _text(LEFT, y + 14, f"{size} parameters, seconds", "start", 13)
        y += 22
        for (name, seconds), colour in zip(found.items(), COLOURS, strict=False):
            width = WIDTH * seconds / max(found.values())
            yield _text(LEFT - 8, y + 14, name, "end")
            yield (
                f'<rect x="{LEFT}" y="{y:g}" width="{width:.1f}" height="{BAR - 4}" '
                f'fill="{colour}"/>'
            )
            yield _text(LEFT + width + 6, y + 14, f"{seconds:.3g}", "start")
            y += BAR
        y += 14


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{text}</text>'


def svg() -> str:
    """Return the picture."""
    rows = sum(map(len, MEASURED.values()))
    height, width = 10 + rows * BAR + len(MEASURED) * 36, LEFT + WIDTH + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" fill="#222">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_drawn(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
