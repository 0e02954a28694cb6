"""Measures latency and bandwidth between each pair of ranks, by messages that go there and back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero.comm.clock import Progress
from zero.comm.communicator import Communicator
from zero.device import synchronize
from zero.tools.doctor.checks import OK, SLOW, Finding

# A link with less than this part of the median bandwidth is named.
SLOW_LINK = 0.5
_SMALL, _LARGE = 8, 8 << 20  # bytes
_SMALL_TRIPS, _LARGE_TRIPS = 20, 3


class Link(NamedTuple):
    """Between two ranks: seconds of a small message one way, and bytes per second of a large
    one.
    """

    first: int
    second: int
    latency: float
    bandwidth: float


def measure(comm: Communicator) -> list[Link]:
    """All links, one after the other, so that they do not disturb each other.

    All ranks call it and get the same result.
    """
    pairs = list(itertools.combinations(range(comm.world_size), 2))
    seconds = torch.zeros(len(pairs), 2, dtype=torch.float64, device=comm.device)
    progress = Progress(comm.rank == 0, "links")
    for number, pair in enumerate(pairs):
        if comm.rank in pair:
            peer = pair[1 - pair.index(comm.rank)]
            small = _round_trip(comm, peer, _SMALL, _SMALL_TRIPS) / 2
            large = _round_trip(comm, peer, _LARGE, _LARGE_TRIPS) / 2
            if comm.rank == pair[0]:
                seconds[number] = torch.tensor([small, large], dtype=torch.float64)
        dist.barrier()
        progress.advance(len(pairs))
    comm.all_reduce(seconds)
    return [
        Link(*pair, small, _LARGE / max(large - small, 1e-9))
        for pair, (small, large) in zip(pairs, seconds.tolist(), strict=True)
    ]


def _round_trip(comm: Communicator, peer: int, nbytes: int, trips: int) -> float:
    """Seconds of the fastest of `trips` round trips; the first one makes the connection and is not
    counted.
    """
    buffer, best = torch.zeros(nbytes, dtype=torch.uint8, device=comm.device), float("inf")
    first, second = (dist.send, dist.recv) if comm.rank < peer else (dist.recv, dist.send)
    for trip in range(trips + 1):
        start = time.perf_counter()
        first(buffer, peer)
        second(buffer, peer)
        synchronize(comm.device)
        if trip:
            best = min(best, time.perf_counter() - start)
    return best


def findings(links: list[Link]) -> Iterator[Finding]:
    """One line for all links, and one for each that is much slower than most."""
    usual = median(link.bandwidth for link in links)
    latency = median(link.latency for link in links)
    about = f"{usual / 1e9:.2f} GB/s, {latency * 1e6:.0f} us over {len(links)} pair(s) of ranks"
    yield Finding("links", OK, f"median {about}")
    remedy = (
        "look at NCCL_SOCKET_IFNAME, NCCL_IB_HCA, the switch and the cable; or use hybrid sharding"
    )
    for link in links:
        if link.bandwidth < SLOW_LINK * usual:
            found = f"rank {link.first} - {link.second}: {link.bandwidth / 1e9:.2f} GB/s"
            yield Finding("link", SLOW, found, remedy)


def table(links: list[Link], ranks: int) -> str:
    """Bandwidth in GB/s above the diagonal, latency in microseconds below it."""
    cells = {(link.first, link.second): f"{link.bandwidth / 1e9:.2f}" for link in links}
    cells |= {(link.second, link.first): f"{link.latency * 1e6:.0f} us" for link in links}
    rows = [["GB/s \\ us", *(f"rank {rank}" for rank in range(ranks))]]
    rows += [[f"rank {a}", *(cells.get((a, b), "-") for b in range(ranks))] for a in range(ranks)]
    return "\n".join("".join(cell.rjust(10) for cell in row) for row in rows)
