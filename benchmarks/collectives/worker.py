"""One rank of the benchmark of collectives.

Each operation has several implementations ("ways"), all blocking and in fp32. A way is a function
of `full` (world_size * n elements) and `shard` (n elements), and fills one of them. The ways take
turns, in an order that changes with each repeat and is the same on all ranks. First each way is
tested with known numbers. All use the engine's own process group, because a group that has just
been used responds faster than one whose threads sleep."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from zero.comm.communicator import Communicator, communicator

Group = dist.ProcessGroup
Way = Callable[[torch.Tensor, torch.Tensor, Group], object]
ITEM = 4  # bytes of an element
# Each way moves about this many bytes at one size, in several repeats.
BYTES_IN_ALL, LEAST_REPEATS = 500_000_000, 7


def exchange(
    pairs: list[tuple[int, torch.Tensor | None, torch.Tensor | None]], group: Group
) -> None:
    """Exchange messages with each peer of (peer, sent, received), all at the same time."""
    messages = []
    for peer, sent, received in pairs:
        if sent is not None:
            messages.append(dist.P2POp(dist.isend, sent, peer, group))
        if received is not None:
            messages.append(dist.P2POp(dist.irecv, received, peer, group))
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def peers() -> list[int]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [(rank + step) % world_size for step in range(1, world_size)]


def slices(full: torch.Tensor) -> list[torch.Tensor]:
    return list(full.chunk(dist.get_world_size()))


def sum_in_order(out: torch.Tensor, terms: list[torch.Tensor]) -> None:
    out.copy_(terms[0])
    for term in terms[1:]:
        out.add_(term)


# -- all_gather: `full` from all ranks' `shard`


def gather_by_torch(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(full, shard, group=group)


def gather_by_messages(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    parts = slices(full)
    parts[dist.get_rank()].copy_(shard)
    exchange([(peer, parts[dist.get_rank()], parts[peer]) for peer in peers()], group)


def gather_by_broadcasts(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    parts = slices(full)
    parts[dist.get_rank()].copy_(shard)
    for work in [
        dist.broadcast(part, src=rank, group=group, async_op=True)
        for rank, part in enumerate(parts)
    ]:
        work.wait()


# -- reduce_scatter: `shard` is the sum of this rank's slices of all ranks' `full`


def scatter_by_torch(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(shard, full, group=group)


def scatter_by_messages(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    terms, parts = slices(full), slices(full)
    for peer in peers():
        terms[peer] = torch.empty_like(shard)
    exchange([(peer, parts[peer], terms[peer]) for peer in peers()], group)
    sum_in_order(shard, terms)


def scatter_by_all_to_all(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    received = torch.empty_like(full)
    dist.all_to_all_single(received, full, group=group)
    sum_in_order(shard, slices(received))


# -- all_reduce: every rank's `full` becomes the sum of all


def reduce_by_torch(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    dist.all_reduce(full, group=group)


def reduce_by_messages(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    """Each rank sends everything to all other ranks."""
    terms = [torch.empty_like(full) for _ in range(dist.get_world_size())]
    terms[dist.get_rank()].copy_(full)
    exchange([(peer, full, terms[peer]) for peer in peers()], group)
    sum_in_order(full, terms)


def reduce_in_two(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    """Each rank sums one slice, and sends it to all other ranks."""
    scatter_by_messages(full, shard, group)
    gather_by_messages(full, shard, group)


# -- gradients: as an all-reduce, but `full` holds the gradients of a model, which are tensors of
# their own

# A vector of so many elements and a square matrix of this width take turns.
WIDTHS = {"gradients 512": 512, "gradients 64": 64}


def tensors_in(full: torch.Tensor, width: int) -> list[torch.Tensor]:
    found, start = [], 0
    for size in itertools.cycle((width, width * width)):
        if start >= full.numel():
            return found
        found.append(full[start : start + size])
        start += size


def reduce_one_by_one(width: int, full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    for tensor in tensors_in(full, width):
        dist.all_reduce(tensor, group=group)


def reduce_all_at_once(width: int, full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    for work in [
        dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors_in(full, width)
    ]:
        work.wait()


def reduce_in_a_bucket(width: int, full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    bucket = torch.cat(tensors_in(full, width))
    dist.all_reduce(bucket, group=group)
    torch._foreach_copy_(tensors_in(full, width), tensors_in(bucket, width))


# -- broadcast: rank 0's `full` to all ranks


def broadcast_by_torch(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    dist.broadcast(full, src=0, group=group)


def broadcast_by_messages(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    exchange(
        [(peer, full, None) for peer in peers()] if dist.get_rank() == 0 else [(0, None, full)],
        group,
    )


def ways(comm: Communicator) -> dict[str, dict[str, Way]]:
    """Return the ways by operation and name. "engine" is the method of `comm`."""

    def scatter_by_engine(full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
        comm.reduce_scatter(shard, full, False).wait()

    def reduce_by_engine(width: int, full: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
        bucket = torch.cat(tensors_in(full, width))
        total = torch.empty_like(bucket)
        comm.reduce(total, bucket, False).wait()
        torch._foreach_copy_(tensors_in(full, width), tensors_in(total, width))
        full.mul_(
            comm.mean_factor * comm.world_size
        )  # 1 on gloo, where the result is a sum already

    of_gradients = {
        "one by one": reduce_one_by_one,
        "one by one, async": reduce_all_at_once,
        "one bucket": reduce_in_a_bucket,
        "engine": reduce_by_engine,
    }
    return {
        **{
            name: {way: partial(f, width) for way, f in of_gradients.items()}
            for name, width in WIDTHS.items()
        },
        "all_reduce": {
            "torch": reduce_by_torch,
            "messages": reduce_by_messages,
            "messages, in two": reduce_in_two,
            "engine": lambda full, shard, group: comm.all_reduce(full),
        },
        "all_gather": {
            "torch": gather_by_torch,
            "messages": gather_by_messages,
            "broadcasts": gather_by_broadcasts,
            "engine": lambda full, shard, group: comm.all_gather(full, shard).wait(),
        },
        "reduce_scatter": {
            "torch": scatter_by_torch,
            "messages": scatter_by_messages,
            "all-to-all": scatter_by_all_to_all,
            "engine": scatter_by_engine,
        },
        "broadcast": {
            "torch": broadcast_by_torch,
            "messages": broadcast_by_messages,
            "engine": lambda full, shard, group: comm.broadcast(full, src=0),
        },
    }


def values(rank: int, numel: int) -> torch.Tensor:
    """Return whole numbers, so that sums in any order are equal."""
    return torch.randint(1000, (numel,), generator=torch.Generator().manual_seed(rank)).float()


def verify(operation: str, name: str, way: Way, comm: Communicator) -> None:
    """Raise RuntimeError unless the way computes its operation on a few numbers."""
    rank, world_size = comm.rank, comm.world_size
    full = values(rank, 1001 * world_size).to(comm.device)
    shard = full[:1001].clone()
    way(full, shard, comm._group)
    whole = [values(other, full.numel()) for other in range(world_size)]
    if operation == "all_gather":
        found, expected = full, torch.cat([each[: shard.numel()] for each in whole])
    elif operation == "broadcast":
        found, expected = full, whole[0]
    elif operation in ("all_reduce", *WIDTHS):
        found, expected = full, torch.stack(whole).sum(0)
    else:
        found, expected = shard, slices(torch.stack(whole).sum(0))[rank]
        if name == "engine":
            found = found * comm.mean_factor * world_size
    if not torch.allclose(found.cpu(), expected):
        raise RuntimeError(f"{operation} by {name}: another result than expected")


def timed(
    way: Way, full: torch.Tensor, shard: torch.Tensor, comm: Communicator
) -> tuple[float, float]:
    """Return wall and CPU seconds of this process (all threads).

    The time starts when all ranks are ready.
    """
    comm.all_reduce(torch.zeros(1, device=comm.device))  # wait for all ranks
    _synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    way(full, shard, comm._group)
    _synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(
    comm: Communicator, megabytes: float, most: int
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return, by operation and way, the seconds of each of `most` repeats or fewer, at one size of
    `full`.
    """
    n = max(1, round(megabytes * 1e6 / ITEM / comm.world_size))
    full = torch.zeros(n * comm.world_size, device=comm.device)
    shard = torch.zeros(n, device=comm.device)
    repeats = min(most, max(LEAST_REPEATS, int(BYTES_IN_ALL / full.nbytes)))
    order = random.Random(0)
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for operation, by_name in ways(comm).items():
        for way in by_name.values():
            way(full, shard, comm._group)
        samples[operation] = {name: [] for name in by_name}
        for _ in range(repeats):
            for name in order.sample(list(by_name), len(by_name)):
                samples[operation][name].append(timed(by_name[name], full, shard, comm))
    return samples


def measure_all(sizes_mb: list[float], repeats: int) -> list[dict]:
    """On a rank: test each way, and measure all of them at each size."""
    comm = communicator()
    for operation, by_name in ways(comm).items():
        for name, way in by_name.items():
            verify(operation, name, way, comm)
    return [measure(comm, size, repeats) for size in sizes_mb]
