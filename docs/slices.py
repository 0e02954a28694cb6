"""Draws `slices.svg`, which shows what micro-batches and slices of a batch fetch, and when.

`docs.generate` writes it. The times follow from a small model of a step: one link for weights, one
for gradients, one compute device, and weights that are fetched ahead."""

from collections.abc import Iterator
from typing import NamedTuple

PARTS, BLOCKS = "ABCD", (1, 2)
FETCH, FORWARD, BACKWARD, SEND = 3.0, 1.0, 2.0, 1.5
LANES = ("weights in", "compute", "gradients out")
# By block: a forward or a transfer, and a backward.
COLOURS = {1: ("#9ecae1", "#3182bd"), 2: ("#fdd0a2", "#e6550d")}
UNIT, HEIGHT, LEFT, GAP = 16, 24, 110, 46


class Box(NamedTuple):
    """Work of a lane on a block, from `start` to `end`; `part`: of the batch."""

    lane: int
    block: int
    start: float
    end: float
    part: str = ""
    is_backward: bool = False


def schedule(batches: list[str]) -> Iterator[Box]:
    """Yield the work of a step: of each of `batches`, all parts go through a block together."""
    link = device = out = 0.0
    for parts in batches:
        # The last block is still there when its backward begins.
        for block, is_backward, is_fetched in (
            (1, False, True), (2, False, True), (2, True, False), (1, True, True),
        ):  # fmt: skip
            if is_fetched:
                yield Box(0, block, link, link + FETCH)
                link += FETCH
                device = max(device, link)
            for part in parts:
                end = device + (BACKWARD if is_backward else FORWARD)
                yield Box(1, block, device, end, part, is_backward)
                device = end
            if is_backward:
                out = max(out, device)
                yield Box(2, block, out, out + SEND)
                out += SEND


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{text}</text>'


def _drawn(title: str, batches: list[str], top: float) -> Iterator[str]:
    yield _text(LEFT, top - 8, title, size=13)
    for lane, name in enumerate(LANES):
        yield _text(LEFT - 8, top + lane * HEIGHT + 16, name, "end")
    for box in schedule(batches):
        x, y = LEFT + box.start * UNIT, top + box.lane * HEIGHT
        width, colour = (box.end - box.start) * UNIT, COLOURS[box.block][box.is_backward]
        yield (
            f'<rect x="{x:g}" y="{y + 2:g}" width="{width - 1:g}" height="{HEIGHT - 4}" '
            f'fill="{colour}"/>'
        )
        yield _text(x + width / 2, y + 16, box.part or str(box.block), "middle", 11)


def svg() -> str:
    """Return the picture."""
    ways = {
        "4 micro-batches A, B, C, D: each fetches blocks 1 and 2 again": list(PARTS),
        "one micro-batch in 4 slices A, B, C, D: a block runs all of them while it is there": [
            PARTS
        ],
    }
    one = len(LANES) * HEIGHT + GAP
    width = LEFT + UNIT * max(box.end for way in ways.values() for box in schedule(way)) + 10
    height = one * len(ways) + 28
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="sans-serif" fill="#222">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (title, batches) in enumerate(ways.items()):
        lines += _drawn(title, batches, number * one + 30)
    key = "blue: block 1, orange: block 2; light: forward and transfers, dark: backward"
    lines += [_text(LEFT, height - 12, key), "</svg>"]
    return "\n".join(lines) + "\n"
