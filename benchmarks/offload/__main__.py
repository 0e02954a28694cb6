"""Measures a training step with parameters and optimizer in host memory or in files, compared with
a lower bound.

    python -m benchmarks.offload
    python -m benchmarks.offload --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED
    python -m benchmarks.offload --model t5-3b --folder FOLDER_ON_A_FAST_DISK
        # on a GPU, bf16
    python -m benchmarks.offload.slices
        # a large batch, in micro-batches and in slices

Variants of this engine at stage 3 ("ours"): without offload; everything in host memory; the same
with half of the optimizer state on the device (`ratio`); everything in files, with the update
inside the step; everything in files, with early reads, late writes and the update during the next
forward. "8-bit": with `zero_quantized_moments`. Peers: FSDP2 with `CPUOffloadPolicy`, and DeepSpeed
with everything in host memory. Without a GPU, FSDP2 runs without offload, and "ours" in host memory
is the same as without offload. DeepSpeed's offload to files is not run, because it needs async_io,
which has to be built.

All variants train the same model on the same batches, in turns and in new processes. Ratios are
formed within a round. The losses must agree with those of "ours" without offload. Peaks of memory
are those of the counted steps.

`floor` is the lower bound, the largest of these times:

- plain torch's forward and backward, measured;
- 28 bytes per parameter (16 with 8-bit moments) for the part of Adam in host memory, divided by the
  bandwidth of a triad;
- bytes to and from files, divided by the file's bandwidths;
- on a GPU, gathered and reduced bytes, divided by the bandwidths to and from the GPU (for a peer,
  the bytes of "ours").

On a CPU, compute and update share the same cores, so no step reaches the floor. `cpu s`: seconds of
all threads of a rank. `/ comp.`: their ratio to plain torch's forward and backward. On a shared
machine, compare these two."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import Parser, interpreter, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from benchmarks.offload.worker import MODELS, VARIANTS
from zero.tools.arguments import count

REFERENCE, IN_MEMORY = "no offload", "cpu"
# Bytes of Adam for a parameter. Read: gradient (16-bit or fp32), master, moments. Written: master,
# moments, parameter.
ADAM_BYTES, ADAM_BYTES_8_BIT = 28, 16
# Bytes of an element of a reduced gradient that is copied to the host.
GRADIENT_BYTES = 4
# Largest relative difference of a loss. In fp32 the order of sums differs, in bf16 the places of
# rounding.
LOSS_TOLERANCE = {4: 1e-3, 2: 2e-2}

Row = dict[str, Any]


def parse_job_arguments(parser: Parser, warmup: int, steps: int, output: str) -> argparse.Namespace:
    """Add the options of every job, with these defaults, parse, and make the folders."""
    parser.add_argument("--model", choices=MODELS, default="t5-small")
    parser.add_argument(
        "--deepspeed-python",
        type=interpreter,
        help="interpreter of an environment that has deepspeed",
    )
    parser.add_argument("--ranks", type=count, default=1, help="one for each GPU, if there are any")
    parser.add_argument(
        "--threads", type=count, help="compute threads of a process; default: its part of the cores"
    )
    parser.add_argument(
        "--length", type=count, default=128, help="tokens of each source and of each target"
    )
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument(
        "--warmup", type=int, default=warmup, help="steps that do not count, per round"
    )
    parser.add_argument("--steps", type=count, default=steps, help="steps counted, per round")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder for the offload files; default: the folder of the output",
    )
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / output
    )
    args = parser.parse_args()
    args.threads = args.threads or max(1, (os.cpu_count() or 1) // args.ranks)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.folder = (args.folder or args.output.parent).resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), help="default: all that can run"
    )
    parser.add_argument("--batch", type=count, default=1, help="sentences per process and step")
    args = parse_job_arguments(parser, warmup=2, steps=5, output="offload.json")
    args.variants = list(dict.fromkeys([REFERENCE, *(args.variants or VARIANTS)]))
    if any(name.startswith("deepspeed") for name in args.variants) and not args.deepspeed_python:
        args.variants = [name for name in args.variants if not name.startswith("deepspeed")]
        print("DeepSpeed is missing: --deepspeed-python was not given")
    return args


def run(
    variant: str, ranks: int, folder: str, args: argparse.Namespace, more: Sequence[str] = ()
) -> list[Row]:
    """Run one job. `benchmarks.offload.worker` says what a rank reports, and which options `more`
    has.
    """
    options = {
        name: getattr(args, name) for name in ("model", "batch", "length", "warmup", "steps")
    }
    command = ["-m", "benchmarks.offload.worker", "--variant", variant, "--folder", folder]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command += more
    env = {"OMP_NUM_THREADS": str(args.threads)}
    if not variant.startswith("deepspeed"):
        return run_ranks(sys.executable, command, ranks, 3600, env)
    if not torch.cuda.is_available():
        env["DS_ACCELERATOR"] = "cpu"  # otherwise it looks for a GPU
    return run_ranks(args.deepspeed_python, command, ranks, 3600, env)


def row_of(variant: str, ranks: list[Row], args: argparse.Namespace) -> Row:
    """Return figures of a job's step: seconds, tokens/s, memory of the largest rank, bytes moved by
    all ranks.
    """
    seconds = statistics.median(second for rank in ranks for second in rank["seconds"])
    moved = [rank["moved"] for rank in ranks if rank["moved"] is not None]
    item, parameters = ranks[0]["item"], ranks[0]["parameters"]
    row = {
        "parameters": parameters,
        "item": item,
        "seconds": seconds,
        "cpu": statistics.mean(rank["cpu"] for rank in ranks),
        "tokens_per_s": len(ranks) * args.batch * 2 * args.length / seconds,
        "host": max(rank["host"] for rank in ranks),
        "device": max(rank["device"] for rank in ranks),
        "phases": ranks[0]["phases"],
        "waits": ranks[0]["waits"],
        "adam_on_host": host_share(variant)
        * (ADAM_BYTES_8_BIT if "8-bit" in variant else ADAM_BYTES)
        * parameters,
    }
    if moved:
        # A rank counts whole buffers. Each rank sends only its own part of them.
        row |= {"gathered": moved[0]["gathered"] * item, "reduced": moved[0]["reduced"] * item}
        row |= {name: sum(rank[name] for rank in moved) for name in ("read", "written")}
        row["to_device"] = moved[0]["gathered"] * item / len(ranks)
        row["from_device"] = moved[0]["reduced"] * GRADIENT_BYTES / len(ranks)
    return row


def host_share(variant: str) -> float:
    """Return the fraction of the optimizer state that is updated in host memory."""
    if not torch.cuda.is_available():
        return 1.0
    return {REFERENCE: 0.0, "cpu, half": 0.5}.get(variant, 1.0)


def add_floors(rows: dict[str, Row], limits: Row) -> None:
    """Add to every row its floor in seconds, and its ratios to the floor and to the reference."""
    for variant, row in rows.items():
        bounds = {"compute": limits["compute"], "adam": row["adam_on_host"] / limits["triad"]}
        if "read" in row:
            bounds["files"] = row["read"] / limits["read"] + row["written"] / limits["written"]
        ways = row if "to_device" in row else rows.get(IN_MEMORY, {})
        if "to_device" in limits and variant != REFERENCE and "to_device" in ways:
            # Both directions run at the same time.
            bounds["pcie"] = max(ways[way] / limits[way] for way in ("to_device", "from_device"))
        row["bound_by"] = max(bounds, key=bounds.get)
        row["bounds"], row["floor"] = bounds, bounds[row["bound_by"]]
        row["to_floor"] = row["seconds"] / row["floor"]
        row["cpu_to_compute"] = row["cpu"] / limits["compute_cpu"]
        row["to_reference"] = row["seconds"] / rows[REFERENCE]["seconds"]


def check_losses(variant: str, ranks: list[Row], reference: list[Row]) -> None:
    tolerance = LOSS_TOLERANCE[ranks[0]["item"]]
    for rank, other in zip(ranks, reference, strict=True):
        pairs = zip(rank["losses"], other["losses"], strict=True)
        difference = max(abs(loss - expected) / abs(expected) for loss, expected in pairs)
        if not difference <= tolerance:
            sys.exit(
                f"error: {variant}: losses differ from {REFERENCE!r} by {difference:.1e}: another "
                "training"
            )


def one_round(folder: str, missing: dict[str, str], args: argparse.Namespace) -> dict[str, Row]:
    """Run every variant once, and the floor.

    Failed ones go to `missing`, with the line that names the cause.
    """
    rows, reference = {}, []
    limits = run("floor", 1, folder, args)[0]
    floor = ", ".join(f"{name} {of_limit(name, value)}" for name, value in limits.items())
    print(f"  floor: {floor}", flush=True)
    for variant in args.variants:
        if variant in missing:
            continue
        try:
            ranks = run(variant, args.ranks, folder, args)
        except RuntimeError as error:
            missing[variant] = cause(str(error))
            print(f"  {variant}: failed: {missing[variant]}", flush=True)
            continue
        reference = reference or ranks
        check_losses(variant, ranks, reference)
        rows[variant] = row_of(variant, ranks, args)
        print(
            f"  {variant}: {rows[variant]['seconds']:.3f} s, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    if REFERENCE not in rows:
        sys.exit(
            f"error: {REFERENCE!r}, to which the others are compared, did not run: "
            f"{missing[REFERENCE]}"
        )
    add_floors(rows, limits)
    return rows


def of_limit(name: str, value: float) -> str:
    return f"{value:.3f} s" if name.startswith("compute") else f"{value / 1e9:.2f} GB/s"


def cause(output: str) -> str:
    """Return the line of a failed job's output that names the exception, or the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (named or lines)[-1][:300]


def over_rounds(rounds: list[dict[str, Row]]) -> dict[str, Row]:
    """Return medians of the numbers over the rounds. Other values are those of the last round."""
    rows: dict[str, Row] = {}
    for variant in rounds[-1]:
        each = [found[variant] for found in rounds]
        rows[variant] = {
            name: statistics.median(row[name] for row in each)
            if isinstance(value, (int, float))
            else value
            for name, value in each[-1].items()
        }
    return rows


def table(rows: dict[str, Row]) -> str:
    """Return the table: seconds, peak memory in MB, and MB moved in a step."""
    titles = [
        "step s",
        "tokens/s",
        "floor s",
        "/ floor",
        "/ none",
        "cpu s",
        "/ comp.",
        "device",
        "host",
        "gathered",
        "reduced",
    ]
    lines = [
        "  ".join(
            [
                f"{'variant':<14}",
                *(f"{title:>8}" for title in (*titles, "read", "written")),
                "bound by",
            ]
        )
    ]
    for variant, row in rows.items():
        cells = [f"{row['seconds']:8.3f}", f"{row['tokens_per_s']:8.1f}", f"{row['floor']:8.3f}"]
        cells += [
            f"{row[name]:8.2f}" for name in ("to_floor", "to_reference", "cpu", "cpu_to_compute")
        ]
        for name in ("device", "host", "gathered", "reduced", "read", "written"):
            cells.append(f"{row[name] / 1e6:8.0f}" if name in row else f"{'':>8}")
        lines.append("  ".join([f"{variant:<14}", *cells, row["bound_by"]]))
    return "\n".join(lines)


def table_of_waits(rows: dict[str, Row]) -> str:
    """Return a table of this engine's steps: seconds of each phase, and the waits in it."""
    lines = []
    for variant, row in rows.items():
        parts = []
        for phase, spent in row["phases"].items():
            waits = [
                f"{name.split(': ')[1]} {s:.3f}"
                for name, s in row["waits"].items()
                if name.startswith(phase)
            ]
            parts.append(
                f"{phase} {spent:.3f}" + (f" (waits: {', '.join(waits)})" if waits else "")
            )
        if parts:
            lines.append(f"{variant:<14}  {'; '.join(parts)}")
    return "\n".join(lines)


def plot(rows: dict[str, Row], path: Path) -> None:
    """Plot seconds of a step with their floors (left), and peak memory (right)."""
    import matplotlib  # imported here, so that the table needs no matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names = list(rows)
    places = range(len(names))
    left.barh(places, [rows[name]["seconds"] for name in names], color="C0", label="step")
    if "floor" in rows[names[0]]:
        floors = [rows[name]["floor"] for name in names]
        left.barh(places, floors, height=0.3, color="black", label="floor")
    left.set(xlabel="seconds", title="a step", yticks=places, yticklabels=names)
    right.barh(
        places, [rows[name]["host"] / 1e9 for name in names], height=0.4, color="C1", label="host"
    )
    if any(row["device"] for row in rows.values()):
        above = [place + 0.4 for place in places]
        right.barh(
            above,
            [rows[name]["device"] / 1e9 for name in names],
            height=0.4,
            color="C2",
            label="device",
        )
    right.set(xlabel="GB", title="memory at its peak", yticks=places, yticklabels=names)
    for axis in (left, right):
        axis.invert_yaxis()
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write(args: argparse.Namespace, missing: dict[str, str], rounds: list[dict[str, Row]]) -> None:
    """Write all figures beside the plot of their medians."""
    rows = over_rounds(rounds)
    settings = {
        name: str(value)
        for name, value in vars(args).items()
        if name not in ("output", "deepspeed_python")
    }
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    result = {
        "settings": settings,
        "versions": versions,
        "missing": missing,
        "rows": rows,
        "rounds": rounds,
    }
    args.output.write_text(json.dumps(result, indent=2))
    plot(rows, args.output.with_suffix(".png"))
    print(f"\nwritten: {args.output}, {args.output.with_suffix('.png')}")


def main() -> None:
    args = parse_arguments()
    missing: dict[str, str] = {}
    rounds = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in range(1, args.rounds + 1):
            print(f"round {number}/{args.rounds}", flush=True)
            rounds.append(one_round(folder, missing, args))
    rows = over_rounds(rounds)
    some = rows[REFERENCE]
    where = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else "no GPU: fsdp2 runs without offload"
    )
    print(
        f"\n{args.model}, {some['parameters'] / 1e6:.1f}M parameters, "
        f"{'bf16' if some['item'] == 2 else 'fp32'}, "
        f"{args.batch} x ({args.length} + {args.length}) tokens, {args.ranks} rank(s); "
        f"{where}\n\n{table(rows)}\n\n"
        f"seconds of a step by phase\n{table_of_waits(rows)}\n\nDeepSpeed with files: not run, "
        "async_io is not built"
    )
    for variant, reason in missing.items():
        print(f"{variant}: failed: {reason}")
    write(args, missing, rounds)
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
