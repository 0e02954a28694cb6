"""Calls `torch.distributed` for parameters and gradients. Its only other caller for them is a
pipeline, for weights that two stages have.

[Note: collectives] Operations work on flat 1-D tensors. Those of the training path return a
`Pending`, whose `wait()` makes the result usable. The others block, and say so. There are two ways,
each of which is a class here:

Communicator        on CPUs, all-gathers and reductions are made of gloo's point-to-point messages:
                    torch's reduce-scatter takes 1.7 to 3 times as long, its all-gather 1.2 to 3.5
                    times (benchmarks/collectives/__main__.py). Received slices are summed here, in
                    rank order and in fp32, which is deterministic and more precise.
NativeCommunicator  an accelerator's collectives are torch's own: one call for each operation, on
                    streams beside the computation.

Broadcasts, all-reduces and the exchange of whole tensors are torch's in both.

Sums have one order: within each shard group by rank, then by group. So replicas have the same bits.
Of a parameter group, `zero/comm/` reads `serial`, `name` and `trainable` only; `serial` is unique,
and equal on all ranks."""

from __future__ import annotations

import copy
import ctypes
import itertools
import logging
import mmap
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero.comm.clock import Clock
from zero.comm.control import Channel, Control
from zero.comm.fingerprint import CollectiveOrder, NamedGroup
from zero.comm.traffic import begin, note_copy, send, send_natively
from zero.comm.watchdog import Watchdog, end_with_launcher, names_lone_setup
from zero.comm.work import Pending
from zero.comm.world import (
    Group,
    compute_device,
    default_backend,
    group_timeout,
    init_distributed,
    is_initialized,
)
from zero.device import CPU, accelerator, compute_stream, is_accelerator, mark, new_stream, use

logger = logging.getLogger("zero")

# torch's annotations say that a collective may return None. With `async_op`, and within the group,
# none does.
Work = Any
# Newer releases of torch have other names for the same functions.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# Most bytes of a message to be summed. For larger ones malloc would map new pages each time.
SUMMED_MESSAGE = 4 << 20
_HUGE_PAGE = 2 << 20


def on_huge_pages(buffer: Tensor) -> Tensor:
    """Return `buffer`, new memory without values; on a Linux host with the advice to use pages of
    2 MiB.

    They take a fifth of the time to get, and direct I/O with a disk is two to three times as fast:
    the kernel looks up each page of a request, and the disk gets longer pieces."""
    if sys.platform == "linux" and buffer.device == CPU and buffer.nbytes >= _HUGE_PAGE:
        offset, size = buffer.data_ptr() % mmap.PAGESIZE, ctypes.c_size_t
        start, nbytes = size(buffer.data_ptr() - offset), size(buffer.nbytes + offset)
        ctypes.CDLL(None).madvise(start, nbytes, mmap.MADV_HUGEPAGE)
    return buffer


class Communicator:
    """Collectives of one job on one kind of device; this class is for CPUs.

    Attributes:
        rank, world_size: of the world.
        shard_group, replicate_group: the kinds of groups are in `zero/comm/world.py`.
        worlds: the ranks of each world in the job.
        order: of the operations since the last step.
        model: the communicator of the model group; None if this rank has the whole model.
        share: what a gradient that is averaged over this world must be multiplied by to be a term
            of the mean over all ranks with batches of their own.
        calls, elements, bytes: by operation name, the number of operations, and how much of full
            buffers they moved.
        clock: the time of all engines that use these ranks.
    """

    is_native: ClassVar[bool] = False

    def __init__(self, device: torch.device):
        use(device)
        self.device = device
        rank, size = dist.get_rank(), dist.get_world_size()
        self.clock = Clock(shows=rank == 0)
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        if device == CPU and (unused := accelerator()) is not None and rank == 0:
            logger.warning(
                "torch has no collectives for %s: the engine computes on the CPU", unused
            )
        mark_device = partial(mark, device) if self.is_native else None
        self.watchdog = Watchdog(rank, size, 0.8 * group_timeout().total_seconds(), mark_device)
        weakref.finalize(self, self.watchdog.stop)
        self.model: Communicator | None = None
        self.share = 1.0
        with names_lone_setup(rank):
            self._join([range(size)], None)
            self._channel = self.new_channel("a model or an engine")

    # -- ranks

    def _join(self, worlds: Sequence[Sequence[int]], job: Communicator | None) -> None:
        """Make the process groups of the world that this rank is in.

        `job`: None if that is the world.
        """
        self._job = job
        self.worlds = worlds
        self.shard_group = Group.of(worlds)
        self.replicate_group = Group(0, [dist.get_rank()])
        self.rank = self.shard_group.rank
        self.world_size = self.shard_group.size
        # Numbers of groups, equal on all ranks: they are made in the same order. 0 is for what is
        # not about a group.
        self.serials = itertools.count(1)
        self._made: dict[str, Communicator] = {}
        # The engine's own process groups: its messages never match user code's. Beside an
        # accelerator's, there is one for tensors of the host.
        self._group = self._new_group(worlds)
        self._hosts = self._new_group(worlds, "gloo") if self.is_native else self._group
        self._make_groups(worlds, None)
        self.order = CollectiveOrder()
        # Messages of gloo so far, by kind and group.
        self._sent: Counter[tuple[str, int]] = Counter()

    def _make_groups(
        self, shards: Sequence[Sequence[int]], replicas: Sequence[Sequence[int]] | None
    ) -> None:
        """Make the process groups of `shard_group`, and of `replicate_group` unless that is one
        rank.
        """
        self._shards = self._group if replicas is None else self._new_group(shards)

    def _new_group(self, groups: Sequence[Sequence[int]], backend: str = "") -> dist.ProcessGroup:
        """This rank's one of new process groups of these ranks."""
        made: Any = dist.new_subgroups_by_enumeration(
            [list(ranks) for ranks in groups],
            backend=backend or default_backend(self.device),
            timeout=group_timeout(),
        )[0]
        return made

    def split(
        self, worlds: Sequence[Sequence[int]], models: Sequence[Sequence[int]]
    ) -> Communicator:
        """Return a communicator for the same job, divided into these worlds and model groups.

        All ranks must call it. Counters and clock are shared.
        """
        if (key := str((worlds, models))) not in self._made:
            self._made[key] = world = copy.copy(self)
            world.model = copy.copy(self)
            world._join(worlds, self)
            world.model._join(models, self)
        return self._made[key]

    def within(self, size: int) -> Communicator:
        """The same ranks, with shard groups of `size` consecutive ones, which must divide the
        world. All must call it.

        Everything but the groups is shared: counters, clock, watchdog, the order of operations.
        """
        if size == self.shard_group.size:
            return self
        if (key := f"within {size}") not in self._made:
            made = self._made[key] = copy.copy(self)
            shards = [
                ranks[start : start + size]
                for ranks in self.worlds
                for start in range(0, len(ranks), size)
            ]
            replicas = [ranks[place::size] for ranks in self.worlds for place in range(size)]
            made.shard_group = Group.of(shards)
            made.replicate_group = Group.of(replicas)
            made._make_groups(shards, replicas)
        return self._made[key]

    def every(self, step: int) -> Communicator:
        """Every `step`-th rank of each world as a world of its own, for parameters that only these
        have; `step` must divide the world. All must call it.

        As with `within`, everything but the groups is shared.
        """
        if (key := f"every {step}") not in self._made:
            self._made[key] = made = copy.copy(self)
            places = [ranks[place::step] for ranks in self.worlds for place in range(step)]
            made._join(places, self.job)
            made.serials, made.order = self.serials, self.order
            made.share = 1.0 / step if self.is_native else 1.0
        return self._made[key]

    def apart(self) -> Communicator:
        """The same ranks, with process groups of their own: neither waits for what the other has
        started. All must call it.
        """
        made = copy.copy(self)
        made._made = {}
        made._group = self._new_group(self.worlds)
        made._make_groups(self.worlds, None)
        return made

    def new_channel(self, what: str) -> Channel:
        """A channel of the job's ranks for another thread, in which it does `what`. All must call
        it.
        """
        return Channel(self.watchdog, what)

    def control(self, kind: str, detail: str = "", is_long: bool = False) -> Control:
        """Agrees with all ranks of the job; see `Control`. For the main thread."""
        return Control(self._channel, kind, detail, is_long)

    @property
    def job(self) -> Communicator:
        """The communicator of all ranks."""
        return self._job or self

    @property
    def is_destroyed(self) -> bool:
        """Whether the script has destroyed the process groups since."""
        return self._group not in dist.distributed_c10d._world.pg_map

    @property
    def matches_by_order(self) -> bool:
        """Operations of different ranks match by their order alone."""
        return self.is_native and self.world_size > 1

    @property
    def mean_factor(self) -> float:
        """What `reduce_scatter`'s result must be multiplied by to be the mean over the world."""
        return 1.0 if self.is_native else 1.0 / self.world_size

    def _count(
        self,
        name: str,
        numel: int,
        values: Tensor,
        group: NamedGroup | None = None,
        ranks: Group | None = None,
    ) -> None:
        """An operation on `numel` elements like `values` starts, among `ranks` (the shard group
        unless given).
        """
        nbytes = numel * values.element_size()
        self.calls[name] += 1
        self.elements[name] += numel
        self.bytes[name] += nbytes
        if self.is_native:
            send_natively(name, nbytes, ranks or self.shard_group)
            if self.world_size > 1:
                self.order.add(name, numel, group)

    # -- shards and gradients, in two ways. `group`: the parameter group that is exchanged.

    def all_gather(self, full: Tensor, shard: Tensor, group: NamedGroup | None = None) -> Pending:
        """Fill `full` (ranks of the shard group * n elements) with all their `shard` (n elements;
        on host or device).
        """
        used = begin("all_gather", full, group, self.shard_group.size)
        self._count("all_gather", full.numel(), full, group)
        return self._start_all_gather(full, shard, group).observed_by(used)

    def reduce_scatter(
        self, out: Tensor, full: Tensor, accumulate: bool, group: NamedGroup | None = None
    ) -> Pending:
        """Reduce `full` (ranks * n elements) over all ranks into `out` (n elements, this rank's
        slice).

        Over the shard group first, then the slice over the replicate group. gloo's messages are
        added in fp32; accelerators' backends add in the dtype of `full`. The result times
        `mean_factor` is the mean; it is added to `out` if `accumulate`."""
        used = begin("reduce_scatter", full, group, self.shard_group.size)
        work = self._start_reduce_scatter(out, full, accumulate, group)
        return work.observed_by(used)

    def reduce(
        self, out: Tensor, full: Tensor, accumulate: bool, group: NamedGroup | None = None
    ) -> Pending:
        """As `reduce_scatter`, but every rank gets the whole result: `out` has as many
        elements as `full`.
        """
        own = torch.empty(out.numel() // self.shard_group.size, dtype=out.dtype, device=out.device)
        scattered = self.reduce_scatter(own, full, False, group)

        def finish() -> None:
            total = torch.empty_like(out) if accumulate else out
            self.all_gather(total, own, group).wait()
            if accumulate:
                out.add_(total)

        return Pending([scattered], finish)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, group: NamedGroup | None = None, across: bool = False
    ) -> Pending:
        """Start to send row i of `sent` to rank i of the shard group; row i of `received` is what
        that rank sends here.

        Both are contiguous, of the same shape. gloo does not copy the own row. `across`: among the
        replicate group."""
        ranks = self.replicate_group if across else self.shard_group
        used = begin("all_to_all", sent, group, ranks.size)
        self._count("all_to_all", sent.numel(), sent, group, ranks)
        return self._start_all_to_all(received, sent, group, across).observed_by(used)

    # -- gloo's messages. Each has a tag with the number of its parameter group. So ranks that use
    # different groups wait for each other, and the watchdog finds them.

    def _tag(self, kind: str, group: NamedGroup | None) -> int:
        """The tag of the next message of `kind` about `group`: 22 bits group, 1 bit kind, 8 bits
        counter.
        """
        key = 0 if group is None else group.serial
        self._sent[kind, key] += 1
        return (key % (1 << 22)) << 9 | (kind == "reduce") << 8 | self._sent[kind, key] % (1 << 8)

    def _exchange(
        self,
        name: str,
        ranks: Group,
        tag: int,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
    ) -> list[Work]:
        """Start messages: `sent[i]` goes to place i of `ranks`, and what comes from there fills
        `received[i]`.

        `name`: of the operation, for whoever follows the messages.
        """
        # gloo tells a peer that a message is awaited by the same socket: behind a sent message that
        # comes too late.
        works: list[Work] = [
            dist.irecv(received[at], ranks.ranks[at], group=self._group, tag=tag)
            for at in ranks.others
        ]
        send(ranks, [part.nbytes for part in sent])
        return works + [
            dist.isend(sent[at], ranks.ranks[at], group=self._group, tag=tag) for at in ranks.others
        ]

    def _start_all_gather(self, full: Tensor, shard: Tensor, group: NamedGroup | None) -> Pending:
        ranks = self.shard_group
        own = full.narrow(0, ranks.rank * shard.numel(), shard.numel())
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard, non_blocking=True)
        if ranks.size == 1:
            return Pending()
        slices = full.view(ranks.size, -1).unbind()
        tag = self._tag("gather", group)
        works = self._exchange("all_gather", ranks, tag, [own] * ranks.size, slices)
        return Pending(works, None, (full, own), self.watchdog, group)

    def _start_reduce_scatter(
        self, out: Tensor, full: Tensor, accumulate: bool, group: NamedGroup | None
    ) -> Pending:
        n, step = out.numel(), SUMMED_MESSAGE // full.element_size()
        parts = [
            self._reduce_columns(out[first : first + step], full, first, accumulate, group)
            for first in range(0, n, step)
        ]
        return parts[0] if len(parts) == 1 else Pending(parts)

    def _reduce_columns(
        self, out: Tensor, full: Tensor, first: int, accumulate: bool, group: NamedGroup | None
    ) -> Pending:
        """Reduce columns of `full`, seen as a (shard group, n) matrix, into `out`: as many as it
        has elements, from `first` on.
        """
        ranks, replicas, width = self.shard_group, self.replicate_group, out.numel()
        rows = list(full.view(ranks.size, -1)[:, first : first + width].unbind())
        terms = [
            row if place == ranks.rank else torch.empty_like(row) for place, row in enumerate(rows)
        ]
        self._count("reduce_scatter", width * ranks.size, full, group)
        tag = self._tag("reduce", group)
        works = self._exchange("reduce_scatter", ranks, tag, rows, terms)

        def finish() -> None:
            if replicas.size == 1:
                _add_up(out, terms, accumulate)
                return
            sums = torch.empty(replicas.size, width, dtype=torch.float32, device=out.device)
            own = _add_up(sums[replicas.rank], terms, False)
            self._count("reduce_replicas", width, own, group)
            works = self._exchange(
                "reduce_replicas", replicas, tag, [own] * replicas.size, sums.unbind()
            )
            Pending(works, None, (), self.watchdog, group).wait()
            _add_up(out, sums.unbind(), accumulate)

        return Pending(works, finish, (full,), self.watchdog, group)

    def _start_all_to_all(
        self, received: Tensor, sent: Tensor, group: NamedGroup | None, across: bool
    ) -> Pending:
        ranks = self.replicate_group if across else self.shard_group
        tag = self._tag("reduce", group)
        works = self._exchange("all_to_all", ranks, tag, sent.unbind(), received.unbind())
        return Pending(works, None, (received, sent), self.watchdog, group)

    # -- torch's own collectives, on every device

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy `tensor` of rank `src` of the world to all of it, in place. Blocking.

        What is in host memory does not wait for an accelerator.
        """
        used = begin("broadcast", tensor, ranks=self.world_size)
        self._count("broadcast", tensor.numel(), tensor)
        group = self._hosts if tensor.device.type == "cpu" else self._group
        self._blocking("a broadcast", lambda: dist.broadcast(tensor, group=group, group_src=src))
        used()

    def start_broadcasts(self, parts: Sequence[tuple[int, Tensor]]) -> Pending:
        """Start to copy each (place, tensor) from that place in the shard group to all of it, in
        place.

        All ranks give the same parts.
        """
        if self.shard_group.size == 1:
            return Pending()
        started, what = [], "a part of the weights"
        for src, tensor in parts:
            used = begin("broadcast", tensor, ranks=self.shard_group.size)
            self._count("broadcast", tensor.numel(), tensor)
            work: Work = dist.broadcast(tensor, group=self._shards, group_src=src, async_op=True)
            pending = Pending([work], None, (tensor,), self.watchdog, what)
            started.append(pending.observed_by(used))
        return Pending(started)

    def start_all_to_all_of_parts(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
        what: str = "an exchange of whole tensors",
    ) -> Pending:
        """Start to send part i of `sent`, of `sent_sizes[i]` elements, to rank i of the shard
        group; fill `received`.

        Both are 1-D and hold their parts in the order of ranks. `what`: its name in messages.
        """
        used = begin("all_to_all", sent, ranks=self.shard_group.size)
        self._count("all_to_all", 0, sent)  # how much goes where differs between ranks
        moved = sent.numel() - sent_sizes[self.shard_group.rank]
        self.elements["all_to_all"] += moved
        self.bytes["all_to_all"] += moved * sent.element_size()
        send(self.shard_group, [size * sent.element_size() for size in sent_sizes])
        work: Work = dist.all_to_all_single(
            received, sent, received_sizes, sent_sizes, group=self._shards, async_op=True
        )
        return Pending([work], None, (received, sent), self.watchdog, what).observed_by(used)

    def all_reduce(self, tensor: Tensor, op: str = "sum", of_shards: bool = False) -> Tensor:
        """Sum ("sum") or least value ("min") over all ranks, in place; `of_shards`: over the shard
        group. Blocking.

        What is in host memory does not wait for an accelerator.
        """
        ranks = self.shard_group.size if of_shards else self.world_size
        used = begin("all_reduce", tensor, ranks=ranks)
        self._count("all_reduce", tensor.numel(), tensor)
        operation = getattr(dist.ReduceOp, op.upper())
        group = self._shards if of_shards else self._group
        if tensor.device.type == "cpu" and not of_shards:
            group = self._hosts
        self._blocking(
            "a sum over ranks", lambda: dist.all_reduce(tensor, op=operation, group=group)
        )
        used()
        return tensor

    def _blocking(self, what: str, collective: Callable[[], object]) -> None:
        if self.world_size > 1:
            self.watchdog.wait(collective, f"{what} after {self.watchdog.position}")


class NativeCommunicator(Communicator):
    """An accelerator's own collectives, which the device matches by their order.

    The host blocks for none of them. Reductions have process groups of their own, because ranks may
    start them between different all-gathers in the first backward."""

    is_native = True
    # Streams, made when they are needed.
    _copies: torch.Stream | None = None
    _sums: torch.Stream | None = None

    def _make_groups(
        self, shards: Sequence[Sequence[int]], replicas: Sequence[Sequence[int]] | None
    ) -> None:
        super()._make_groups(shards, replicas)
        self._copies = self._sums = None
        self._reductions = self._new_group(shards)
        self._replicas = None if replicas is None else self._new_group(replicas)

    def _start_all_gather(self, full: Tensor, shard: Tensor, group: NamedGroup | None) -> Pending:
        own = full.narrow(0, self.shard_group.rank * shard.numel(), shard.numel())
        if shard.device.type == "cpu":
            return self._all_gather_from_host(full, own, shard, group)
        if self.shard_group.size > 1:
            work = _all_gather(full, shard, group=self._shards, async_op=True)
            return Pending([work], None, (full, shard), self.watchdog, group)
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard, non_blocking=True)
        return Pending()

    def _all_gather_from_host(
        self, full: Tensor, own: Tensor, shard: Tensor, group: NamedGroup | None
    ) -> Pending:
        """The shard is copied on a stream of its own, for which NCCL waits."""
        self._copies = self._copies or new_stream(self.device)
        # Kernels of the compute stream may still read the former content of `full`.
        self._copies.wait_stream(compute_stream(self.device))
        note_copy(own, shard)
        with self._copies:
            own.copy_(shard, non_blocking=True)
            if self.shard_group.size == 1:
                copied = self._copies.record_event()
                return Pending(
                    (), lambda: compute_stream(self.device).wait_event(copied), (own, shard)
                )
            work = _all_gather(full, own, group=self._shards, async_op=True)
        return Pending([work], None, (full, own, shard), self.watchdog, group)

    def _start_reduce_scatter(
        self, out: Tensor, full: Tensor, accumulate: bool, group: NamedGroup | None
    ) -> Pending:
        works: list[Work] = []
        if self.shard_group.size == 1:
            self._count("reduce_scatter", full.numel(), full, group)
            result = full
        else:
            in_place = out.dtype == full.dtype and not accumulate
            result = out if in_place else torch.empty_like(out, dtype=full.dtype)
            # After the allocation, which may fail: then nothing has started.
            self._count("reduce_scatter", full.numel(), full, group)
            average = {"op": dist.ReduceOp.AVG, "group": self._reductions, "async_op": True}
            works = [_reduce_scatter(result, full, **average)]
        if self.replicate_group.size > 1:
            works = [self._average_replicas(result, works, group)]

        def finish() -> None:
            if accumulate:
                out.add_(result)
            elif result is not out:
                out.copy_(result)

        return Pending(works, finish, (full, result), self.watchdog, group)

    def _average_replicas(
        self, result: Tensor, works: Sequence[Work], group: NamedGroup | None
    ) -> Work:
        """Start to average over the replicate group after `works`: a stream of its own waits for
        them.
        """
        self._count("reduce_replicas", result.numel(), result, group, self.replicate_group)
        self._sums = self._sums or new_stream(self.device)
        self._sums.wait_stream(compute_stream(self.device))
        with self._sums:
            for work in works:
                work.wait()
            return dist.all_reduce(
                result, op=dist.ReduceOp.AVG, group=self._replicas, async_op=True
            )

    def _start_all_to_all(
        self, received: Tensor, sent: Tensor, group: NamedGroup | None, across: bool
    ) -> Pending:
        ranks = self._replicas if across else self._reductions
        work: Work = dist.all_to_all_single(received, sent, group=ranks, async_op=True)
        return Pending([work], None, (received, sent), self.watchdog, group)


def _add_up(out: Tensor, terms: Sequence[Tensor], accumulate: bool) -> Tensor:
    """Make `out` the sum of `terms`, in their order and in fp32, or add them to it if
    `accumulate`.
    """
    total = out.float()  # `out` itself if that is fp32
    total = total.add_(terms[0]) if accumulate else total.copy_(terms[0])
    for term in terms[1:]:
        total.add_(term)
    return out if total is out else out.copy_(total)


_communicators: dict[torch.device, Communicator] = {}


def communicator() -> Communicator:
    """The communicator of this process's compute device, made (with the process group, if need be)
    on first use.
    """
    if not is_initialized():
        init_distributed()
    device = compute_device()
    if not _communicators:
        end_with_launcher()
    if device not in _communicators or _communicators[device].is_destroyed:
        kind = NativeCommunicator if is_accelerator(device) else Communicator
        _communicators[device] = kind(device)
    return _communicators[device]


@contextmanager
def apart() -> Iterator[None]:
    """Context in which `communicator()` is another one of the same ranks, so that the transfers of
    an engine that is made here do not queue behind those of another engine. All must enter it.
    """
    shared = communicator()
    _communicators[shared.device] = shared.apart()
    try:
        yield
    finally:
        _communicators[shared.device] = shared
