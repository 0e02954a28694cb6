"""Measures a step with a large batch, in micro-batches and in slices (`batch_slices`).

    python -m benchmarks.offload.slices
    python -m benchmarks.offload.slices --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED
    python -m benchmarks.offload.slices --model t5-3b --places "in files" --folder FAST_DISK \\
        --slices 16 --ways whole slices --rounds 1 --warmup 1 --steps 1

Each variant trains on the same sequences in a step, with gradient checkpointing, so that all have
the same amount of computation:

- as micro-batches of one sequence, each of which gathers all weights again;
- as one micro-batch, whole or in slices.

Places, at stage 3: weights and optimizer in host memory, or in files with the update during the
next forward. At most a quarter of the weights may be gathered at a time (`--live`). Peers run the
micro-batches in host memory: FSDP2 (without a GPU it runs without offload), and DeepSpeed.

All variants train the same model on the same batches, in turns and in new processes. `/ memory` is
the ratio to the same way in host memory, formed within a round. Bytes are those of a step."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import torch

from benchmarks.arguments import Parser
from benchmarks.models import build_t5
from benchmarks.offload.__main__ import (
    Row,
    cause,
    check_losses,
    over_rounds,
    parse_job_arguments,
    row_of,
    run,
    write,
)
from benchmarks.offload.worker import MODELS
from zero.tools.arguments import count

MEMORY = "in memory"
# The worker's variants.
PLACES = {MEMORY: "cpu", "in files": "nvme, behind"}
PEERS = {"fsdp2": "fsdp2", "deepspeed": "deepspeed cpu"}
MICRO_BATCHES, WHOLE = "micro-batches", "whole"


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--sequences", type=count, default=16, help="of a step, per process")
    parser.add_argument("--slices", type=count, nargs="+", default=[4, 16])
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=[MICRO_BATCHES, WHOLE, "slices"],
        default=[MICRO_BATCHES, WHOLE, "slices"],
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--live", type=count, help="weights that may be gathered at a time")
    args = parse_job_arguments(parser, warmup=1, steps=3, output="slices.json")
    args.batch = args.sequences  # of the worker, and of a row
    with torch.device("meta"):
        parameters = sum(param.numel() for param in build_t5(MODELS[args.model], 0).parameters())
    args.live = args.live or parameters // 4
    if not args.deepspeed_python and "deepspeed" in args.peers:
        args.peers.remove("deepspeed")
        print("DeepSpeed is missing: --deepspeed-python was not given")
    return args


def ways_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the worker's options of each way to take a batch."""
    ways = {
        MICRO_BATCHES: [f"--micro-batches={args.sequences}"],
        WHOLE: [],
        **{f"{number} slices": [f"--slices={number}"] for number in args.slices},
    }
    return {name: way for name, way in ways.items() if name.split()[-1] in args.ways}


def variants_of(args: argparse.Namespace) -> dict[str, tuple[str, list[str]]]:
    """Return the worker's variant and options, by the name of a row."""
    common = ["--checkpointing", f"--live={args.live}"]
    found = {
        f"{place}, {name}": (PLACES[place], common + way)
        for place in args.places
        for name, way in ways_of(args).items()
    }
    micro = [*common, f"--micro-batches={args.sequences}"]
    return found | {f"{peer}, {MICRO_BATCHES}": (PEERS[peer], micro) for peer in args.peers}


def one_round(folder: str, missing: dict[str, str], args: argparse.Namespace) -> dict[str, Row]:
    """Run every variant once. Failed ones go to `missing`, with the line that names the cause."""
    rows, reference = {}, []
    for name, (variant, options) in variants_of(args).items():
        if name in missing:
            continue
        try:
            ranks = run(variant, args.ranks, folder, args, options)
        except RuntimeError as error:
            missing[name] = cause(str(error))
            print(f"  {name}: failed: {missing[name]}", flush=True)
            continue
        reference = reference or ranks
        check_losses(name, ranks, reference)
        rows[name] = row = row_of(variant, ranks, args)
        row["per_sequence"] = row["seconds"] / args.sequences
        in_memory = rows.get(f"{MEMORY}, {name.partition(', ')[2]}")
        if in_memory is not None:
            row["to_memory"] = row["seconds"] / in_memory["seconds"]
        seconds, load = row["seconds"], os.getloadavg()[0]
        print(f"  {name}: {seconds:.3f} s, load {load:.1f}", flush=True)
    return rows


def table(rows: dict[str, Row]) -> str:
    """Return the table: seconds, peak memory in MB, and MB moved in a step."""
    columns = {
        "step s": ("seconds", 1, 3),
        "s/seq.": ("per_sequence", 1, 3),
        "/ memory": ("to_memory", 1, 2),
        "cpu s": ("cpu", 1, 2),
        **{
            name: (name, 1e6, 0)
            for name in ("device", "host", "gathered", "reduced", "read", "written")
        },
    }
    lines = ["  ".join([f"{'variant':<24}", *(f"{title:>8}" for title in columns)])]
    for variant, row in rows.items():
        cells = [
            f"{row[key] / unit:8.{digits}f}" if key in row else " " * 8
            for key, unit, digits in columns.values()
        ]
        lines.append("  ".join([f"{variant:<24}", *cells]))
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    missing: dict[str, str] = {}
    rounds = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in range(1, args.rounds + 1):
            print(f"round {number}/{args.rounds}", flush=True)
            rounds.append(one_round(folder, missing, args))
    rows = over_rounds(rounds)
    if not rows:
        sys.exit(f"error: nothing ran: {missing}")
    some = next(iter(rows.values()))
    print(
        f"\n{args.model}, {some['parameters'] / 1e6:.1f}M parameters, "
        f"{'bf16' if some['item'] == 2 else 'fp32'}, {args.sequences} x ({args.length} + "
        f"{args.length}) tokens a step, {args.ranks} rank(s), at most {args.live / 1e6:.1f}M "
        f"elements gathered\n\n{table(rows)}"
    )
    for name, reason in missing.items():
        print(f"{name}: failed: {reason}")
    write(args, missing, rounds)
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
