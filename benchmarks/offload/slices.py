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

from argparse import Namespace
from typing import Any

import torch

from benchmarks.models import build
from benchmarks.offload.__main__ import LOSS_TOLERANCE, MOVED, in_bytes
from benchmarks.runner import Parser, Row, by_variant, finish, summary, table, take_turns
from benchmarks.step.comparison import add_options, choose, heading, run
from zero.tools.arguments import count

MEMORY, MICRO_BATCHES, WHOLE = "in memory", "micro-batches", "whole"
PLACES = {MEMORY: "zero3-offload", "in files": "zero3-files-behind"}
PEERS = {"fsdp2": "fsdp2-offload", "deepspeed": "deepspeed3-offload"}
COLUMNS: dict[str, Any] = {
    "variant": "variant",
    "step s": "seconds",
    "s/sequence": "per sequence",
    "/ memory": "to memory",
    "cpu s": "cpu",
    **{f"{name} MB": (name, 1e6) for name in ("device", "host", *MOVED)},
}


def jobs_of(args: Namespace) -> dict[str, tuple[str, dict[str, int]]]:
    """Return the worker's variant and settings, by the name of a row."""
    micro = {"micro_batches": args.batch}
    ways: dict[str, dict[str, int]] = {MICRO_BATCHES: micro, WHOLE: {}}
    ways |= {f"{number} slices": {"slices": number} for number in args.slices}
    ways = {name: way for name, way in ways.items() if name.split()[-1] in args.ways}
    found = {
        f"{place}, {name}": (PLACES[place], way)
        for place in args.places
        for name, way in ways.items()
    }
    peers = {f"{peer}, {MICRO_BATCHES}": (variant, micro) for peer, variant in PEERS.items()}
    return found | {name: job for name, job in peers.items() if job[0] in args.variants}


def main() -> None:
    parser = Parser(__doc__)
    ways = [MICRO_BATCHES, WHOLE, "slices"]
    parser.add_argument("--slices", type=count, nargs="+", default=[4, 16])
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--live", type=count, help="weights that may be gathered at a time")
    add_options(
        parser, model="t5-small", ranks=1, batch=16, length=128, rounds=2, warmup=1, steps=3
    )
    args = parser.parse_args()
    args.dtype = "bf16" if torch.cuda.is_available() else "fp32"
    args.checkpointing, args.variants = True, [*PLACES.values(), *PEERS.values()]
    choose(args, args.variants)
    with torch.device("meta"):
        parameters = sum(param.numel() for param in build(args.model).parameters())
    live, jobs = args.live or parameters // 4, jobs_of(args)

    def turn(name: str) -> Row:
        variant, settings = jobs[name]
        row = in_bytes(run(variant, args, live=live, **settings), args)
        return row | {"per sequence": row["seconds"] / args.batch}

    rounds, missing = take_turns(jobs, args.rounds, turn)
    for found in rounds:
        for name, row in found.items():
            in_memory = found.get(f"{MEMORY}, {name.partition(', ')[2]}")
            if in_memory is not None:
                row["to memory"] = row["seconds"] / in_memory["seconds"]
    tolerances = {"loss diff": LOSS_TOLERANCE[args.dtype]}
    base, rows = summary(rounds, list(jobs), missing, tolerances)
    caption = f"{heading(args, rows[base])}; at most {live / 1e6:.1f}M elements gathered"
    finish(
        args, table(caption, COLUMNS, by_variant(rows)), missing=missing, rows=rows, rounds=rounds
    )


if __name__ == "__main__":
    main()
