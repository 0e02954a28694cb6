"""The only caller of `torch.distributed` for parameters and gradients.

[Note: collectives] Operations work on flat 1-D tensors. Those of the training path return a
`Pending`, whose `wait()` makes the result usable. The others block, and say so. On an accelerator
the collectives are torch's own. On gloo, all-gathers and reductions are made of point-to-point
messages: torch's reduce-scatter takes 1.7 to 3 times as long, its all-gather 1.2 to 3.5 times
(benchmarks/collectives/__main__.py). Received slices are summed here, in rank order and in fp32.
That is deterministic and more precise. Broadcasts, all-reduces and the exchange of whole tensors
are torch's on gloo too.

Sums have one order: within each shard group by rank, then by group. So replicas have the same bits.
Of a group, this file knows only a number and a text for messages."""

from __future__ import annotations

import copy
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from zero.comm.clock import Clock
from zero.comm.fingerprint import CollectiveOrder, MessageTags, explain
from zero.comm.traffic import note_copy, send, send_natively
from zero.comm.watchdog import Watchdog, end_with_launcher
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
from zero.errors import UsageError

T = TypeVar("T")
logger = logging.getLogger("zero")

# Newer releases of torch have other names for the same functions.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# Most bytes of a message to be summed. For larger ones malloc would map new pages each time.
SUMMED_MESSAGE = 8 << 20


class Communicator:
    """Collectives of one job on one kind of device.

    Attributes: rank, world_size: of the world. shard_group, replicate_group: the kinds of groups
    are in `zero/comm/world.py`. model: the communicator of the model group; None if this rank has
    the whole model. calls, elements, bytes: by operation name, the number of operations, and how
    much of full buffers they moved. sent: elements of this rank's messages in all-gathers and
    reductions on gloo, by (operation name, receiver). clock: the time of all engines that use these
    ranks. matches_by_order: operations of different ranks match by their order alone."""

    def __init__(self, device: torch.device):
        use(device)
        self.device = device
        self._native = is_accelerator(device)
        rank, size = dist.get_rank(), dist.get_world_size()
        if device == CPU and (unused := accelerator()) is not None and rank == 0:
            logger.warning(
                "torch has no collectives for %s: the engine computes on the CPU", unused
            )
        self.clock = Clock(shows=rank == 0)
        self.calls, self.elements, self.bytes = (Counter[str]() for _ in range(3))
        self.sent: Counter[tuple[str, int]] = Counter()
        mark_device = partial(mark, device) if self._native else None
        self.watchdog = Watchdog(rank, size, 0.8 * group_timeout().total_seconds(), mark_device)
        weakref.finalize(self, self.watchdog.stop)
        # streams, made when they are needed
        self._copies = None
        self._sums = None
        self.model: Communicator | None = None
        self._split: dict[str, Communicator] = {}
        self._join([range(size)], None)

    def _join(self, worlds: Sequence[Sequence[int]], job: Communicator | None) -> None:
        """Make the process groups of the world that this rank is in.

        `job`: None if that is the world.
        """
        self._job = job
        self._worlds = worlds
        self.shard_group = Group.of(worlds)
        self.replicate_group = Group(0, [dist.get_rank()])
        self.rank = self.shard_group.rank
        self.world_size = self.shard_group.size
        # Numbers of groups, equal on all ranks: they are made in the same order. 0 is for what is
        # not about a group.
        self.serials = itertools.count(1)
        # The engine's own process groups: its messages never match user code's. Reductions have
        # one, as ranks may start them between different all-gathers in the first backward. The
        # hosts have one to compare these orders.
        self._group = self._new_group(worlds)
        self._reductions = self._new_group(worlds) if self._native else self._group
        self._hosts = self._new_group(worlds, "gloo") if self._native else self._group
        self._order = CollectiveOrder()
        self._tags = MessageTags()
        self.matches_by_order = self._native and self.world_size > 1
        # Of `shard_group`, and natively of `replicate_group`.
        self._shards = self._group
        self._replicas = None
        self._within: dict[int, Communicator] = {}

    def split(
        self, worlds: Sequence[Sequence[int]], models: Sequence[Sequence[int]]
    ) -> Communicator:
        """The same job, cut into these worlds and model groups.

        All must call it. Counters and clock are shared.
        """
        if (key := str((worlds, models))) not in self._split:
            self._split[key] = made = copy.copy(self)
            made.model = copy.copy(self)
            for each, groups in ((made, worlds), (made.model, models)):
                each._join(groups, self)
        return self._split[key]

    def within(self, size: int) -> Communicator:
        """The same ranks, with shard groups of `size` consecutive ones, which must divide the
        world. All must call it.

        Everything but the groups is shared: counters, clock, watchdog, the order of operations.
        """
        if size == self.shard_group.size:
            return self
        if size not in self._within:
            made = self._within[size] = copy.copy(self)
            shards = [
                ranks[start : start + size]
                for ranks in self._worlds
                for start in range(0, len(ranks), size)
            ]
            replicas = [ranks[place::size] for ranks in self._worlds for place in range(size)]
            made.shard_group = Group.of(shards)
            made.replicate_group = Group.of(replicas)
            made._shards = made._reductions = self._new_group(shards)
            if self._native:
                made._reductions = self._new_group(shards)
                made._replicas = self._new_group(replicas)
        return self._within[size]

    def _new_group(
        self, groups: Sequence[Sequence[int]], backend: str | None = None
    ) -> dist.ProcessGroup:
        """This rank's one of new process groups of these ranks."""
        options = {"backend": backend or default_backend(self.device), "timeout": group_timeout()}
        return dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], **options)[0]

    @property
    def job(self) -> Communicator:
        """The communicator of all ranks."""
        return self._job or self

    @property
    def is_destroyed(self) -> bool:
        """Whether the script has destroyed the process groups since."""
        return self._group not in dist.distributed_c10d._world.pg_map

    @property
    def mean_factor(self) -> float:
        """What `reduce_scatter`'s result must be multiplied by to be the mean over the world."""
        return 1.0 if self._native else 1.0 / self.world_size

    def _count(
        self,
        name: str,
        numel: int,
        values: torch.Tensor,
        param_group: object = None,
        to: Group | None = None,
    ) -> None:
        self.calls[name] += 1
        self.elements[name] += numel
        self.bytes[name] += (nbytes := numel * values.element_size())
        if self.matches_by_order:
            self._order.add(name, numel, param_group)
        if self._native:
            send_natively(name, nbytes, to or self.shard_group)

    def require_same_path(self) -> None:
        """Raise UsageError on all ranks if they have used different groups since the last call.

        All must call it.
        """
        if not self.matches_by_order:
            return  # messages of gloo have numbers: those of different groups never match
        own = torch.tensor(self._order.digests, device="cpu")
        bounds = torch.cat([own, ~own])  # ~x falls as x rises
        self._blocking(
            "the comparison of paths",
            lambda: dist.all_reduce(bounds, dist.ReduceOp.MIN, self._hosts),
        )
        if not torch.equal(bounds[:2], ~bounds[2:]):
            raise UsageError(explain(self.exchange(self._order.recent)))
        self._order.start_over()

    def _exchange(
        self,
        name: str,
        group: Group,
        tag: int,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
    ) -> list[dist.Work]:
        """Start messages:

        `sent[i]` goes to place i of `group`; what comes from there fills `received[i]`.
        """
        # gloo tells a peer that a message is awaited by the same socket: behind a sent message that
        # comes too late.
        works = [
            dist.irecv(received[at], group.ranks[at], group=self._group, tag=tag)
            for at in group.others()
        ]
        send(group, [part.nbytes for part in sent])
        self.sent.update({(name, group.ranks[at]): sent[at].numel() for at in group.others()})
        return works + [
            dist.isend(sent[at], group.ranks[at], group=self._group, tag=tag)
            for at in group.others()
        ]

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, param_group: object = None
    ) -> Pending:
        """Fill `full` (ranks of the shard group * n elements) with all their `shard` (n elements;
        on host or device).

        `group`, here and below: the group that is exchanged. Its `serial` is in messages' tags, its
        text in reports."""
        self._count("all_gather", full.numel(), full, param_group)
        own = full.narrow(0, self.shard_group.rank * shard.numel(), shard.numel())
        if self._native and shard.device.type == "cpu":
            return self._all_gather_from_host(full, own, shard, param_group)
        if self._native and self.shard_group.size > 1:
            work = _all_gather(full, shard, group=self._shards, async_op=True)
            return Pending([work], None, (full, shard), self.watchdog, param_group)
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard, non_blocking=True)
        if self.shard_group.size == 1:
            return Pending()
        tag, slices = self._tags.next("gather", param_group), full.view(self.shard_group.size, -1)
        works = self._exchange(
            "all_gather", self.shard_group, tag, [own] * self.shard_group.size, slices
        )
        return Pending(works, None, (full, own), self.watchdog, param_group)

    def _all_gather_from_host(
        self, full: torch.Tensor, own: torch.Tensor, shard: torch.Tensor, param_group: object
    ) -> Pending:
        """As `all_gather`, from a shard in host memory: it is copied on a stream of its own, for
        which NCCL waits.
        """
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
        return Pending([work], None, (full, own, shard), self.watchdog, param_group)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        accumulate: bool,
        max_numel: int,
        param_group: object = None,
    ) -> Pending:
        """Reduce `full` (ranks * n elements) over all ranks into `out` (n elements, this rank's
        slice).

        Over the shard group first, then the slice over the replicate group. gloo's messages are
        added in fp32; accelerators' backends add in the dtype of `full`. The result times
        `mean_factor` is the mean; it is added to `out` if `accumulate`. At most `max_numel`
        elements (at least one a rank) go into one exchange of messages; natively, all of `full`
        goes into one collective."""
        if self._native:
            return self._reduce_scatter_natively(out, full, accumulate, param_group)
        n, step = out.numel(), max(1, max_numel // self.shard_group.size)
        step = min(step, SUMMED_MESSAGE // full.element_size())
        parts = [
            self._reduce_columns(
                out[a : a + step], full, n, a, min(step, n - a), accumulate, param_group
            )
            for a in range(0, n, step)
        ]
        return parts[0] if len(parts) == 1 else Pending(parts)

    def reduce(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        accumulate: bool,
        max_numel: int,
        param_group: object = None,
    ) -> Pending:
        """As `reduce_scatter`, but every rank gets the whole result:

        `out` has as many elements as `full`.
        """
        own = torch.empty(out.numel() // self.shard_group.size, dtype=out.dtype, device=out.device)
        scattered = self.reduce_scatter(own, full, False, max_numel, param_group)

        def finish() -> None:
            total = torch.empty_like(out) if accumulate else out
            self.all_gather(total, own, param_group).wait()
            if accumulate:
                out.add_(total)

        return Pending([scattered], finish)

    def _reduce_columns(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        n: int,
        first: int,
        width: int,
        accumulate: bool,
        param_group: object,
    ) -> Pending:
        """Reduce columns `first : first + width` of `full` seen as a (shard group, n) matrix."""
        self._count("reduce_scatter", width * self.shard_group.size, full, param_group)
        group, replicas = self.shard_group, self.replicate_group
        rows = [full.narrow(0, place * n + first, width) for place in range(group.size)]
        terms = [
            row if place == group.rank else torch.empty_like(row) for place, row in enumerate(rows)
        ]
        tag = self._tags.next("reduce", param_group)
        works = self._exchange("reduce_scatter", group, tag, rows, terms)

        def finish() -> None:
            if replicas.size == 1:
                _add_up(out, terms, accumulate)
                return
            sums = list(
                torch.empty(replicas.size, width, dtype=torch.float32, device=out.device).unbind()
            )
            own = _add_up(sums[replicas.rank], terms, False)
            self._count("reduce_replicas", width, own, param_group)
            works = self._exchange(
                "reduce_replicas", replicas, tag, [own] * replicas.size, sums
            )  # to other ranks
            Pending(works, None, (), self.watchdog, param_group).wait()
            _add_up(out, sums, accumulate)

        return Pending(works, finish, (full,), self.watchdog, param_group)

    def _reduce_scatter_natively(
        self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, param_group: object
    ) -> Pending:
        self._count("reduce_scatter", full.numel(), full, param_group)
        alone, in_place = self.shard_group.size == 1, out.dtype == full.dtype and not accumulate
        result = (
            full
            if alone
            else out
            if in_place
            else torch.empty(out.numel(), dtype=full.dtype, device=full.device)
        )
        average = {"op": dist.ReduceOp.AVG, "group": self._reductions, "async_op": True}
        works = [] if alone else [_reduce_scatter(result, full, **average)]
        if self.replicate_group.size > 1:
            works = [self._average_replicas(result, works, param_group)]

        def finish() -> None:
            if accumulate:
                out.add_(result)
            elif result is not out:
                out.copy_(result)

        return Pending(works, finish, (full, result), self.watchdog, param_group)

    def _average_replicas(
        self, result: torch.Tensor, works: Sequence[dist.Work], param_group: object
    ) -> dist.Work:
        """Start to average over the replicate group after `works`: a stream of its own waits for
        them.
        """
        self._count("reduce_replicas", result.numel(), result, param_group, self.replicate_group)
        self._sums = self._sums or new_stream(self.device)
        self._sums.wait_stream(compute_stream(self.device))
        with self._sums:
            for work in works:
                work.wait()
            return dist.all_reduce(
                result, op=dist.ReduceOp.AVG, group=self._replicas, async_op=True
            )

    def scatter(self, shard: torch.Tensor, full: torch.Tensor | None, src: int) -> None:
        """Give every rank of the world its slice of `full` of its rank `src`; others may pass None.

        Blocking.
        """
        n, size = shard.numel(), self.shard_group.size
        self._count("scatter", n * size, shard)
        if self.rank == src:
            slices = [
                full.narrow(0, rank % size * n, n) for rank in range(self.world_size)
            ]  # replicas: the same
            shard.copy_(slices[src])
        if self.world_size == 1:
            return
        if self._native:
            buffer = torch.empty(n, dtype=shard.dtype, device=self.device)
            dist.scatter(
                buffer, slices if self.rank == src else None, group=self._group, group_src=src
            )
            shard.copy_(buffer)
            return
        tag, others = (
            self._tags.next("gather", None),
            [rank for rank in range(self.world_size) if rank != src],
        )
        if self.rank == src:
            works = [
                dist.isend(slices[rank], group=self._group, group_dst=rank, tag=tag)
                for rank in others
            ]
        else:
            works = [dist.irecv(shard, group=self._group, group_src=src, tag=tag)]
        Pending(works, None, (full,), self.watchdog, "the distribution of initial values").wait()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Copy `tensor` of rank `src` of the world to all of it, in place. Blocking."""
        self._count("broadcast", tensor.numel(), tensor)
        self._blocking(
            "a broadcast", lambda: dist.broadcast(tensor, group=self._group, group_src=src)
        )

    def start_broadcasts(self, parts: Sequence[tuple[int, torch.Tensor]]) -> Pending:
        """Start to copy each (place, tensor) from that place in the shard group to all of it, in
        place.

        All ranks give the same parts.
        """
        if self.shard_group.size == 1:
            return Pending()
        for _, tensor in parts:
            self._count("broadcast", tensor.numel(), tensor)
        works = [
            dist.broadcast(tensor, group=self._shards, group_src=src, async_op=True)
            for src, tensor in parts
        ]
        return Pending(works, None, (parts,), self.watchdog, "a part of the weights")

    def start_all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        param_group: object = None,
        across: bool = False,
    ) -> Pending:
        """Start to send row i of `sent` to rank i of the shard group; row i of `received` is what
        that rank sends here.

        Both are contiguous, of the same shape. gloo does not copy the own row. `across`: among the
        replicate group."""
        group = self.replicate_group if across else self.shard_group
        self._count("all_to_all", sent.numel(), sent, param_group, group)
        if self._native:
            own = self._replicas if across else self._reductions
            work = dist.all_to_all_single(received, sent, group=own, async_op=True)
            return Pending([work], None, (received, sent), self.watchdog, param_group)
        works = self._exchange(
            "all_to_all", group, self._tags.next("reduce", param_group), sent, received
        )
        return Pending(works, None, (received, sent), self.watchdog, param_group)

    def start_all_to_all_of_parts(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
    ) -> Pending:
        """Start to send part i of `sent`, of `sent_sizes[i]` elements, to rank i of the shard
        group; fill `received`.

        Both are 1-D and hold their parts in the order of ranks.
        """
        self._count("all_to_all", 0, sent)  # how much goes where differs between ranks
        moved = sent.numel() - sent_sizes[self.shard_group.rank]
        self.elements["all_to_all"] += moved
        self.bytes["all_to_all"] += moved * sent.element_size()
        send(self.shard_group, [size * sent.element_size() for size in sent_sizes])
        work = dist.all_to_all_single(
            received, sent, received_sizes, sent_sizes, group=self._shards, async_op=True
        )
        return Pending(
            [work], None, (received, sent), self.watchdog, "an exchange of whole tensors"
        )

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", of_shards: bool = False
    ) -> torch.Tensor:
        """Sum ("sum") or least value ("min") over all ranks, in place;

        `of_shards`: over the shard group. Blocking.
        """
        self._count("all_reduce", tensor.numel(), tensor)
        operation, group = (
            getattr(dist.ReduceOp, op.upper()),
            self._shards if of_shards else self._group,
        )
        self._blocking(
            "a sum over ranks", lambda: dist.all_reduce(tensor, op=operation, group=group)
        )
        return tensor

    def exchange(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks.

        Blocking and slow: not for training steps.
        """
        values = [value] * self.world_size
        self._blocking(
            "an exchange of facts", lambda: dist.all_gather_object(values, value, group=self._hosts)
        )
        return values

    def _blocking(self, what: str, collective: Callable[[], object]) -> None:
        if self.world_size > 1:
            self.watchdog.wait(collective, f"{what} after {self.watchdog.position}")


def _add_up(out: torch.Tensor, terms: Sequence[torch.Tensor], accumulate: bool) -> torch.Tensor:
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
        _communicators[device] = Communicator(device)
    return _communicators[device]
