"""Compressed communication: errors of a sum, and bytes and time of each collective.

    python -m benchmarks.collectives.compression
    python -m benchmarks.collectives.compression --sizes-mb 1 10

sums         A gradient of 2 ranks is summed by each scheme; rank 1's values are larger by a
             factor. The error is the 2-norm of the difference to the sum in float64, over that of
             the sum. "one scale, sum of codes" is the method of a known guide: each rank scales
             its whole tensor by its own largest value, the codes are summed over ranks, and the
             sum is multiplied by one rank's scale. Codes of different scales have different units:
             the sum of 100 cm and 1 inch is not 101 cm.
collectives  The engine's all-gather and reduce-scatter on gloo, plain and compressed: bytes sent by
             a rank, and time. They run in turns. A size is that of the whole buffer in fp32. Bytes
             are counted where messages leave.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.runner import Parser, Row, Table, finish, ranks, table
from zero.comm.communicator import Communicator, communicator
from zero.comm.quantized import BLOCK, CompressedCommunicator, decode, encode, message_bytes
from zero.tools.arguments import above_zero, count

FACTORS = (1, 2, 10, 100)
NUMEL = 1 << 20
REPEATS = 15
COLUMNS = {
    **{name: name for name in ("operation", "dtype", "way", "MB")},
    "sent MB": ("sent", 1e6),
    "of plain": "of plain",
    "ms": ("wall", 1e-3),
    "CPU ms": ("cpu", 1e-3),
}


# -- sums


def codes_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes with one scale for all of the tensor."""
    scale = values.abs().max() / 127
    return (values / scale).round(), scale


def naive(gradients: list[torch.Tensor]) -> torch.Tensor:
    codes, scales = zip(*map(codes_of, gradients), strict=True)
    return sum(codes) * scales[0]


def one_scale(gradients: list[torch.Tensor]) -> torch.Tensor:
    """One scale for each rank's tensor, but each is decoded by its own before the sum."""
    return sum(codes * scale for codes, scale in map(codes_of, gradients))


def in_blocks(bits: int) -> Any:
    def scheme(gradients: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(gradients[0])
        for gradient in gradients:
            message = torch.empty(message_bytes(gradient.numel(), bits), dtype=torch.uint8)
            encode(gradient, message, bits)
            decode(message, total, bits, add=True)
        return total

    return scheme


SCHEMES = {
    "one scale, sum of codes": naive,
    "one scale, decoded, then summed": one_scale,
    "blocks of 256, 8 bits": in_blocks(8),
    "blocks of 256, 4 bits": in_blocks(4),
}


def gradient_like(generator: torch.Generator) -> torch.Tensor:
    """Rows of a matrix differ in size by a factor of up to 100, as a layer's gradients do."""
    rows = torch.logspace(-2, 0, NUMEL // 1024)[:, None]
    return (torch.randn(NUMEL // 1024, 1024, generator=generator) * rows).view(-1)


def sums() -> Table:
    rows: dict[str, list[Any]] = {name: [name] for name in SCHEMES}
    for factor in FACTORS:
        generator = torch.Generator().manual_seed(0)
        gradients = [gradient_like(generator), factor * gradient_like(generator)]
        exact = sum(gradient.double() for gradient in gradients)
        for name, scheme in SCHEMES.items():
            error = (scheme(gradients).double() - exact).norm() / exact.norm()
            rows[name].append(error.item())
    columns = ["scheme", *(f"factor {factor}" for factor in FACTORS)]
    caption = "Relative error of a sum over 2 ranks, by the factor between their values"
    return Table(caption, columns, list(rows.values()))


# -- collectives


def ways(comm: Communicator, operation: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"plain": comm}
    for bits in (8,) if operation == "all_gather" else (8, 4):
        plain[f"{bits} bits"] = CompressedCommunicator(
            comm, weights=True, frozen_weights=False, gradient_bits=bits
        )
    return plain


def act(way: Any, operation: str, full: torch.Tensor, shard: torch.Tensor) -> None:
    group = SimpleNamespace(trainable=True, serial=0)
    if operation == "all_gather":
        way.all_gather(full, shard, group).wait()
    else:
        way.reduce_scatter(shard, full, False, group).wait()


def sent_by(*task: Any) -> int:
    sent, isend = [], dist.isend

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    with mock.patch.object(dist, "isend", counted):
        act(*task)
    return sum(sent)


def measure(comm: Communicator, operation: str, dtype: torch.dtype, size: float) -> list[Row]:
    n = max(1, round(size * 1e6 / 4 / comm.world_size / BLOCK)) * BLOCK
    generator = torch.Generator().manual_seed(comm.rank)
    full = torch.randn(n * comm.world_size, generator=generator).to(comm.device, dtype)
    shard = torch.randn(n).to(comm.device, dtype if operation == "all_gather" else torch.float32)
    found, order = ways(comm, operation), random.Random(0)
    facts = {"operation": operation, "dtype": str(dtype).removeprefix("torch."), "MB": size}
    rows = {
        name: {**facts, "way": name, "sent": sent_by(way, operation, full, shard)}
        for name, way in found.items()
    }
    for row in rows.values():
        row["wall"], row["cpu"] = [], []
    for _ in range(REPEATS):
        for name in order.sample(list(found), len(found)):
            comm.all_reduce(torch.zeros(1, device=comm.device))  # until all ranks are here
            wall, cpu = time.perf_counter(), time.process_time()
            act(found[name], operation, full, shard)
            rows[name]["wall"].append(time.perf_counter() - wall)
            rows[name]["cpu"].append(time.process_time() - cpu)
    return list(rows.values())


def collectives(sizes_mb: list[float]) -> list[Row]:
    comm, dtypes = communicator(), (torch.float32, torch.bfloat16)
    cases = itertools.product(("all_gather", "reduce_scatter"), dtypes, sizes_mb)
    return [row for case in cases for row in measure(comm, *case)]


def merged(found: list[list[Row]]) -> list[Row]:
    """Return the medians: the slowest rank gives the time of an operation."""
    rows: list[Row] = []
    plain = found[0][0]
    for place in zip(*found, strict=True):
        slowest = [max(each) for each in zip(*(row["wall"] for row in place), strict=True)]
        cpu = [seconds for row in place for seconds in row["cpu"]]
        times = {"wall": statistics.median(slowest), "cpu": statistics.median(cpu)}
        plain = place[0] if place[0]["way"] == "plain" else plain
        rows.append(place[0] | times | {"of plain": place[0]["sent"] / plain["sent"]})
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=count, default=2, help="of the collectives")
    parser.add_argument(
        "--sizes-mb", type=above_zero, nargs="+", default=[1, 10, 100], help="of the fp32 buffer"
    )
    parser.add_output()
    args = parser.parse_args()
    rows = merged(ranks(collectives, args.ranks, sizes_mb=args.sizes_mb))
    finish(args, sums(), table(f"Collectives of {args.ranks} ranks", COLUMNS, rows), rows=rows)


if __name__ == "__main__":
    main()
