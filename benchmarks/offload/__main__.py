"""Measures a training step with parameters and optimizer in host memory or in files, compared with
a lower bound.

    python -m benchmarks.offload
    python -m benchmarks.offload --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED
    python -m benchmarks.offload --model t5-3b --folder FOLDER_ON_A_FAST_DISK
        # on a GPU, bf16
    python -m benchmarks.offload.slices
        # a large batch, in micro-batches and in slices

Variants of this engine at stage 3: without offload; everything in host memory; the same with half
of the optimizer state on the device; everything in files, with the update inside the step;
everything in files, with early reads, late writes and the update during the next forward
("behind"). "8bit": with `zero_quantized_moments`. Peers: FSDP2 with `CPUOffloadPolicy`, and
DeepSpeed with everything in host memory, or in files. It builds async_io for the latter at first
use (libaio-dev); where that fails, the variant is left out with the reason. Without a GPU, FSDP2
runs without offload, and this engine in host memory is the same as without offload.

All variants train the same model on the same batches, in turns and in new processes. Ratios are
formed within a round. The losses must agree with those of this engine without offload. Peaks of
memory are those of the counted steps; MB are those of a step. `first s`: the first step, which
creates the state.

`floor` is the lower bound, the largest of these times:
- plain torch's forward and backward, measured;
- 28 bytes per parameter (16 with 8-bit moments) for the part of Adam in host memory, divided by the
  bandwidth of a triad;
- bytes to and from files, divided by the file's bandwidths: of reads, of writes, and of both beside
  each other;
- on a GPU, gathered and reduced bytes, divided by the bandwidths to and from the GPU (for a peer,
  the bytes of this engine).

On a CPU, compute and update share the same cores, so no step reaches the floor. `cpu s`: seconds of
all threads of a rank. `/ comp.`: their ratio to plain torch's forward and backward. On a shared
machine, compare these two."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from typing import Any

import torch

from benchmarks.offload.floor import floor
from benchmarks.runner import (
    Parser,
    Row,
    by_variant,
    finish,
    medians,
    ranks,
    summary,
    table,
    take_turns,
)
from benchmarks.step.comparison import add_options, choose, heading, phases, run

REFERENCE, IN_MEMORY = "zero3", "zero3-offload"
DEFAULT = [REFERENCE, IN_MEMORY, "zero3-offload-8bit", "zero3-offload-half", "zero3-files"]
DEFAULT += ["zero3-files-behind", "zero3-files-8bit", "fsdp2-offload"]
DEFAULT += ["deepspeed3-offload", "deepspeed3-files"]
# Bytes of Adam for a parameter. Read: gradient (16-bit or fp32), master, moments. Written: master,
# moments, parameter.
ADAM_BYTES, ADAM_BYTES_8_BIT = 28, 16
# Bytes of an element of a reduced gradient that is copied to the host.
GRADIENT_BYTES = 4
# Largest relative difference of a loss. In fp32 the order of sums differs, in bf16 the places of
# rounding.
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
MOVED = ("gathered", "reduced", "read", "written")
COLUMNS: dict[str, Any] = {
    "variant": "variant",
    "first s": "first",
    "step s": "seconds",
    "tokens/s": "tokens",
    "floor s": "floor",
    "/ floor": "to floor",
    "/ none": "seconds ratio",
    "cpu s": "cpu",
    "/ comp.": "cpu to compute",
    "device MB": ("device", 1e6),
    "host MB": ("host", 1e6),
    **{f"{name} MB": (name, 1e6) for name in MOVED},
    "bound by": "bound by",
}


def in_bytes(row: Row, args: Namespace) -> Row:
    """Return a row with bytes of all ranks in place of elements."""
    item = 2 if args.dtype == "bf16" else 4
    if "gathered" in row:
        # A rank counts whole buffers. Each rank sends only its own part of them.
        row["to_device"] = row["gathered"] * item / args.ranks
        row["from_device"] = row["reduced"] * GRADIENT_BYTES / args.ranks
        row |= {name: row[name] * item for name in ("gathered", "reduced")}
    row |= {name: row[name] * args.ranks for name in ("read", "written")}
    row["tokens"] = args.ranks * args.batch * 2 * args.length / row["seconds"]
    return row


def host_share(variant: str) -> float:
    """Return the fraction of the optimizer state that is updated in host memory."""
    if not torch.cuda.is_available():
        return 1.0
    return {REFERENCE: 0.0, "zero3-offload-half": 0.5}.get(variant, 1.0)


def add_floors(rows: dict[str, Row], limits: Row) -> None:
    """Add to every row its floor in seconds, and its ratios to it and to plain compute."""
    for variant, row in rows.items():
        adam = ADAM_BYTES_8_BIT if "8bit" in variant else ADAM_BYTES
        nbytes = host_share(variant) * adam * row["parameters"]
        bounds = {"compute": limits["compute"], "adam": nbytes / limits["triad"]}
        moved = row | {"both": row["read"] + row["written"]}
        bounds["files"] = max(moved[way] / limits[way] for way in ("read", "written", "both"))
        ways = row if "to_device" in row else rows.get(IN_MEMORY, {})
        if "to_device" in limits and variant != REFERENCE and "to_device" in ways:
            # Both directions run at the same time.
            bounds["pcie"] = max(ways[way] / limits[way] for way in ("to_device", "from_device"))
        row["bound by"] = max(bounds, key=bounds.get)
        row["floor"] = bounds[row["bound by"]]
        row["to floor"] = row["seconds"] / row["floor"]
        row["cpu to compute"] = row["cpu"] / limits["compute_cpu"]


def limits_of(args: Namespace) -> Row:
    names = ("model", "dtype", "batch", "length", "warmup", "steps")
    task = {name: getattr(args, name) for name in names}
    env = {"OMP_NUM_THREADS": str(args.threads)}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return ranks(floor, 1, timeout=3600, env=env, folder=folder, **task)[0]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--variants", nargs="+", choices=DEFAULT, help="default: all that can run")
    add_options(parser, model="t5-small", ranks=1, batch=1, length=128, rounds=2, warmup=2, steps=5)
    args = parser.parse_args()
    args.dtype = "bf16" if torch.cuda.is_available() else "fp32"
    choose(args, DEFAULT)
    args.variants = list(dict.fromkeys([REFERENCE, *args.variants]))
    limits = []

    def turn(variant: str) -> Row:
        if variant == REFERENCE:
            limits.append(limits_of(args))
        return in_bytes(run(variant, args), args)

    rounds, missing = take_turns(args.variants, args.rounds, turn)
    for rows, of_round in zip(rounds, limits, strict=True):
        add_floors(rows, of_round)
    tolerances = {"loss diff": LOSS_TOLERANCE[args.dtype]}
    base, rows = summary(rounds, args.variants, missing, tolerances)
    bounds = ", ".join(f"{name} {value:.4g}" for name, value in medians(limits).items())
    caption = f"{heading(args, rows[base])}; bounds (s, bytes/s): {bounds}"
    tables = table(caption, COLUMNS, by_variant(rows)), phases(rows)
    finish(args, *tables, missing=missing, rows=rows, rounds=rounds, limits=limits)


if __name__ == "__main__":
    main()
