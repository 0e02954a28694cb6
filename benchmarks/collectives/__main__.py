"""Compares implementations of each collective, on gloo, or on NCCL if there are GPUs: is the
engine's the fastest?

    python -m benchmarks.collectives
    python -m benchmarks.collectives --ranks 4 --sizes-mb 1 10 100 1000

Implementations ("ways"): torch's own call; messages from rank to rank, with sums in the order of
ranks; for an all-gather, a broadcast by each rank; for a reduce-scatter, an all-to-all and a local
sum; and "engine", the method of `zero.comm.communicator.Communicator`. Sizes and bandwidths are
defined as in NCCL's own benchmark: a size is that of the whole buffer, ranks * n elements of fp32.

    algorithm bandwidth = size / time
    bus bandwidth       = algorithm bandwidth * (2 (ranks - 1) / ranks for an all-reduce or
                        gradients,
                          (ranks - 1) / ranks for an all-gather and a reduce-scatter, 1 for a
                          broadcast)

"gradients 512" and "gradients 64" are an experiment with buckets: an all-reduce of a model's
gradients, which are vectors of this many elements and square matrices of this width, one by one or
copied into one bucket and back.

The slowest rank gives the time of an operation. `/ engine`: ratio to the engine's time in the same
repeat, median over the repeats. `cpu ms`: median over ranks, all threads of a rank. 0.002 MB is the
size of a vector of gradient norms."""

from __future__ import annotations

import statistics

import torch

from benchmarks.collectives.worker import measure_all
from benchmarks.runner import Parser, Row, Table, finish, ranks, table
from zero.tools.arguments import above_zero, count

COLUMNS = {
    **{name: name for name in ("operation", "MB", "way")},
    "ms": ("seconds", 1e-3),
    "least ms": ("least", 1e-3),
    "CPU ms": ("cpu", 1e-3),
    "algorithm GB/s": ("bandwidth", 1e9),
    "bus GB/s": ("bus bandwidth", 1e9),
    "/ engine": "to engine",
}


def bus(operation: str, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth."""
    if operation == "broadcast":
        return 1.0
    part = (ranks - 1) / ranks
    return part if operation in ("all_gather", "reduce_scatter") else 2 * part


def rows_of(found: list[list[dict]], sizes: list[float]) -> list[Row]:
    """Return one row for each operation, size and way. The slowest rank gives the time of each
    repeat.
    """
    rows = []
    for operation, by_way in found[0][0].items():
        for number, size in enumerate(sizes):
            samples = {way: [rank[number][operation][way] for rank in found] for way in by_way}
            walls = {
                way: [max(wall for wall, _ in each) for each in zip(*of_ranks, strict=True)]
                for way, of_ranks in samples.items()
            }
            for way, seconds in walls.items():
                cpu = [cpu for of_rank in samples[way] for _, cpu in of_rank]
                bandwidth = size * 1e6 / statistics.median(seconds)
                pairs = zip(seconds, walls["engine"], strict=True)
                rows.append(
                    {
                        "operation": operation,
                        "MB": size,
                        "way": way,
                        "seconds": statistics.median(seconds),
                        "least": min(seconds),
                        "cpu": statistics.median(cpu),
                        "bandwidth": bandwidth,
                        "bus bandwidth": bandwidth * bus(operation, len(found)),
                        "to engine": statistics.median(a / b for a, b in pairs),
                    }
                )
    return rows


def main() -> None:
    parser = Parser(__doc__)
    gpus = torch.cuda.device_count()
    add = parser.add_argument
    add("--ranks", type=count, default=gpus or 2, help="default: one for each GPU, or 2")
    add("--sizes-mb", type=above_zero, nargs="+", default=[0.002, 1, 10, 100], help="10**6 bytes")
    add("--repeats", type=count, default=50, help="at most; there are fewer of large sizes")
    parser.add_output()
    args = parser.parse_args()
    if 0 < gpus < args.ranks:
        parser.error(f"--ranks {args.ranks}: there are {gpus} GPUs, and each rank needs one")
    task = {"sizes_mb": args.sizes_mb, "repeats": args.repeats}
    rows = rows_of(ranks(measure_all, args.ranks, **task), args.sizes_mb)
    caption = f"{'NCCL' if gpus else 'gloo'}, {args.ranks} ranks, fp32"
    buckets = [row for row in rows if row["operation"].startswith("gradients")]
    others = [row for row in rows if row not in buckets]
    tables: list[Table] = [
        table(f"Collectives: {caption}", COLUMNS, others),
        table(f"Gradients, one by one and in a bucket: {caption}", COLUMNS, buckets),
    ]
    finish(args, *tables, rows=rows)


if __name__ == "__main__":
    main()
