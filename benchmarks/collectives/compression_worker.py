"""One rank of the benchmark of compressed collectives, started by
`benchmarks.collectives.compression` on each rank.

Each of the engine's collectives runs plain and compressed, in turns. A size is that of the whole
buffer in fp32. Bytes are counted where messages leave, so on gloo only."""

from __future__ import annotations

import argparse
import itertools
import random
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.launch import report
from zero.comm.communicator import Communicator, communicator
from zero.comm.quantized import BLOCK, CompressedCommunicator

REPEATS = 15


def ways(comm: Communicator, operation: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"plain": comm}
    for bits in (8,) if operation == "all_gather" else (8, 4):
        plain[f"{bits} bits"] = CompressedCommunicator(
            comm, weights=True, frozen_weights=False, gradient_bits=bits
        )
    return plain


def run(way: Any, operation: str, full: torch.Tensor, shard: torch.Tensor) -> None:
    group = SimpleNamespace(trainable=True, serial=0)
    if operation == "all_gather":
        way.all_gather(full, shard, group).wait()
    else:
        way.reduce_scatter(shard, full, False, full.numel(), group).wait()


def sent_by(way: Any, operation: str, full: torch.Tensor, shard: torch.Tensor) -> int:
    sent, isend = [], dist.isend

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    with mock.patch.object(dist, "isend", counted):
        run(way, operation, full, shard)
    return sum(sent)


def measure(
    comm: Communicator, operation: str, dtype: torch.dtype, megabytes: float
) -> list[dict[str, Any]]:
    n = max(1, round(megabytes * 1e6 / 4 / comm.world_size / BLOCK)) * BLOCK
    generator = torch.Generator().manual_seed(comm.rank)
    full = torch.randn(n * comm.world_size, generator=generator).to(comm.device, dtype)
    shard = torch.randn(n).to(comm.device, dtype if operation == "all_gather" else torch.float32)
    found, order = ways(comm, operation), random.Random(0)
    facts = {"operation": operation, "dtype": str(dtype).removeprefix("torch."), "mb": megabytes}
    rows = {
        name: {**facts, "way": name, "sent": sent_by(way, operation, full, shard)}
        for name, way in found.items()
    }
    for row in rows.values():
        row["seconds"], row["cpu_seconds"] = [], []
    for _ in range(REPEATS):
        for name in order.sample(list(found), len(found)):
            comm.all_reduce(torch.zeros(1, device=comm.device))  # until all ranks are here
            wall, cpu = time.perf_counter(), time.process_time()
            run(found[name], operation, full, shard)
            rows[name]["seconds"].append(time.perf_counter() - wall)
            rows[name]["cpu_seconds"].append(time.process_time() - cpu)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes-mb", type=float, nargs="+", required=True)
    args = parser.parse_args()
    comm = communicator()
    cases = itertools.product(
        ("all_gather", "reduce_scatter"), (torch.float32, torch.bfloat16), args.sizes_mb
    )
    report({"rows": [row for case in cases for row in measure(comm, *case)]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
