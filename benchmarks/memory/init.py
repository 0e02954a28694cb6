"""Measures the peak RSS of each rank while a T5 of 1.0e9 parameters is built under `zero.Init`.

    python -m benchmarks.memory.init

The limit is the rank's shards + 1 GiB. RSS includes the interpreter and its imports. The exit code
is 1 if a rank exceeds the limit."""

from __future__ import annotations

import json
import sys

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from zero.tools.arguments import count

GIB = 2**30


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "init_memory.json"
    )
    args = parser.parse_args()

    ranks = run_ranks(
        sys.executable, ["-m", "benchmarks.memory.init_worker"], args.processes, timeout=900
    )
    shards = ranks[0]["parameters"] * ranks[0]["bytes_per_parameter"] / args.processes
    limit = shards + GIB
    print(
        f"T5 of {ranks[0]['parameters'] / 1e9:.3f}e9 parameters, {args.processes} processes, built "
        "in zero.Init\n"
    )
    print(
        f"{'rank':>4}  {'shards':>9}  {'imports':>9}  {'built':>9}  {'peak':>9}  {'limit':>9}  "
        f"{'seconds':>7}"
    )
    for number, rank in enumerate(ranks):
        sizes = (shards, rank["rss_imported"], rank["rss_built"], rank["rss_peak"], limit)
        print(
            f"{number:>4}  {'  '.join(f'{size / GIB:5.2f} GiB' for size in sizes)}  "
            f"{rank['seconds']:7.1f}"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"shards": shards, "limit": limit, "ranks": ranks}, indent=2))
    print(f"\nwritten: {args.output}")
    sys.exit(0 if all(rank["rss_peak"] <= limit for rank in ranks) else 1)


if __name__ == "__main__":
    main()
