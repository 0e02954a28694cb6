"""Measures the bandwidth between each pair of ranks, by messages that go there and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist

from zero.comm.clock import Progress
from zero.comm.communicator import Communicator
from zero.errors import rounded
from zero.tools.doctor.checks import OK, SLOW, Finding
from zero.tools.doctor.speeds import fastest

# A link with less than this part of the median bandwidth is named.
SLOW_LINK = 0.5
_NBYTES = 8 << 20
_REMEDY = (
    "look at NCCL_SOCKET_IFNAME, NCCL_IB_HCA, the switch and the cable; or use hybrid sharding"
)

Pair = tuple[int, int]


def measure(comm: Communicator) -> dict[Pair, float]:
    """GB/s of all links, one after the other, so that they do not disturb each other.

    All ranks call it and get the same result.
    """
    pairs = list(itertools.combinations(range(comm.world_size), 2))
    seconds = torch.zeros(len(pairs), dtype=torch.float64, device=comm.device)
    progress = Progress(comm.rank == 0, "links")
    for number, pair in enumerate(pairs):
        if comm.rank in pair:
            taken = _round_trip(comm, pair[1 - pair.index(comm.rank)])
            seconds[number] = taken if comm.rank == pair[0] else 0.0
        dist.barrier()
        progress.advance(len(pairs))
    comm.all_reduce(seconds)
    return {
        pair: 2 * _NBYTES / taken / 1e9 for pair, taken in zip(pairs, seconds.tolist(), strict=True)
    }


def _round_trip(comm: Communicator, peer: int) -> float:
    """Seconds of the fastest of several round trips; the first one makes the connection and is not
    counted.
    """
    buffer = torch.zeros(_NBYTES, dtype=torch.uint8, device=comm.device)
    first, second = (dist.send, dist.recv) if comm.rank < peer else (dist.recv, dist.send)

    def there_and_back() -> None:
        first(buffer, peer)
        second(buffer, peer)

    return fastest(there_and_back, comm.device, limit=0)


def findings(links: dict[Pair, float]) -> Iterator[Finding]:
    """One line for all links, and one for each that is much slower than most."""
    usual = median(links.values())
    yield Finding("links", OK, f"median {rounded(usual)} GB/s over {len(links)} pair(s) of ranks")
    for (first, second), bandwidth in links.items():
        if bandwidth < SLOW_LINK * usual:
            found = f"rank {first} - {second}: {rounded(bandwidth)} GB/s"
            yield Finding("link", SLOW, found, _REMEDY)
