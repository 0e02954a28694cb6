"""Saving and loading a training state of 250M parameters: this engine, FSDP2 with DCP and, if
given, DeepSpeed.

    python -m benchmarks.checkpoint
    python -m benchmarks.checkpoint --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED
    python -m benchmarks.checkpoint --folder FOLDER_ON_THE_DISK_TO_MEASURE

The state consists of fp32 parameters, masters and two moments. Each variant has its own processes.
The variants take turns, because the disk of a shared machine varies in speed. Each saves several
times in a round. The table has medians over all saves:

blocked    seconds until training continues; `first`: in the first save, which allocates memory for
           the copy
step       seconds of the training step before the save; `after`: of the step after it
total      seconds until everything is on disk; with an asynchronous save, the step after it runs
           meanwhile
load       seconds to load with the files in the page cache; `cold`: with an empty page cache
extra MB   largest anonymous memory

`ours-unsynced` leaves out every fsync. The difference is the cost of durability.
"""

from __future__ import annotations

import statistics
import tempfile

from benchmarks.checkpoint.worker import VARIANTS, measure
from benchmarks.models import MODELS
from benchmarks.runner import (
    Parser,
    Row,
    by_variant,
    environment,
    existing_folder,
    finish,
    medians,
    ranks,
    table,
    take_turns,
)
from zero.tools.arguments import count

COLUMNS = {
    "variant": "variant",
    "blocked s": "blocked",
    "first s": "blocked first",
    "step s": "step before",
    "after s": "step after",
    "total s": "total",
    "load s": "load",
    "cold s": "cold",
    "MB": ("bytes", 1e6),
    "extra MB": ("memory", 1e6),
}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all that can run")
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--saves", type=count, default=3, help="of each variant in each round")
    parser.add_argument("--model", choices=list(MODELS), default="t5-250m")
    parser.add_argument("--folder", type=existing_folder, help="to write to; default: temporary")
    parser.add_deepspeed()
    parser.add_output()
    args = parser.parse_args()
    if not args.deepspeed_python and "deepspeed" in (args.variants or []):
        parser.error("deepspeed: needs --deepspeed-python")
    variants = args.variants or [
        name for name in VARIANTS if args.deepspeed_python or name != "deepspeed"
    ]

    def run(variant: str) -> Row:
        """Return medians over the saves: seconds of the slowest rank, memory of the largest."""
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            task = {"folder": folder, "saves": args.saves, "model": args.model}
            env = environment(variant, args)
            found = ranks(measure, args.processes, timeout=900, variant=variant, **env, **task)
        saves = list(zip(*(rank["saves"] for rank in found), strict=True))
        row = {
            name: statistics.median(max(save[name] for save in of_ranks) for of_ranks in saves)
            for name in ("blocked", "step before", "step after", "total", "bytes", "memory")
        }
        row["blocked first"] = max(save["blocked"] for save in saves[0])
        row |= {name: max(rank[name] for rank in found) for name in ("load", "cold")}
        return row | {"seconds": row["blocked"], "parameters": found[0]["parameters"]}

    rounds, missing = take_turns(variants, args.rounds, run)
    rows = {
        variant: medians([found[variant] for found in rounds if variant in found])
        for variant in variants
        if any(variant in found for found in rounds)
    }
    parameters = max((row["parameters"] for row in rows.values()), default=0)
    caption = f"{args.model}, {parameters / 1e6:.0f}M parameters, fp32, {args.processes} processes"
    finish(
        args, table(caption, COLUMNS, by_variant(rows)), missing=missing, rows=rows, rounds=rounds
    )


if __name__ == "__main__":
    main()
