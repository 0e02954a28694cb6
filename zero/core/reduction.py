"""From the gradients of a backward to the reduced gradient of this rank's shard.

    GroupGradients    what is known of one group's gradients between two steps
    GradientReducer   collects them in flat buffers, reduces the buffers, and hands the result to
                      the group's `OptimizerShard`
    ReductionOrder    when a group's gradients are complete, and when their reduction may start

[Note: order of reductions] Every rank starts its reductions in one agreed order, each as soon as it
and all before it are complete, so ranks whose graphs differ (an expert used on one rank only, a
skipped layer) never wait for different groups. At first this is the reversed order of the groups.
After backward 1, 2, 4, 8, ... rank 0 tells the others the order in which its groups completed, as
DistributedDataParallel rebuilds its buckets. Persistent and shared groups always come last.

[Note: place of a reduction] NCCL can block forever if ranks start operations of two communicators
in different orders. On gloo, a rank that waits because `reduce_bucket_size` is used up does not
join any all-gather, so it must not wait for a reduction that others start only after later
all-gathers.
So where groups are gathered, rank 0 broadcasts after which group use each reduction starts.
All-gathers start at uses, the same on all ranks. If a rank's gradients are not complete at the use
after that, the reduction starts without those that are missing: an expert that was not used has
none. Gradients of persistent and shared groups may come from anywhere in the model, so these groups
are reduced at the end. Before the first broadcast, in the first backward, a group's reduction
starts when autograd leaves its module's call, also at the same use on all ranks."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field

import torch

from zero.comm.clock import label
from zero.comm.communicator import Communicator, on_huge_pages
from zero.comm.work import Pending
from zero.core.micro_batches import MicroBatches
from zero.core.optimizer_shard import OptimizerShard
from zero.core.param_group import ParamGroup
from zero.core.sharded_param import local


@dataclass
class _Reduction:
    """A reduction of a buffer of `numel` elements into `out`, which then goes to `shard`."""

    shard: OptimizerShard
    numel: int
    out: torch.Tensor
    pending: Pending


# With `contiguous`, a group's gradients are copied to its flat buffer, in one call, when this many
# elements wait.
MOST_APART = 1 << 26


@dataclass
class GroupGradients:
    """What is known of one group's gradients between two steps.

    Of the backward that runs:
        parts: by parameter, the gradient that is not reduced yet; None if it is in `flat`.
        flat: the buffer in which gradients are reduced. apart: elements of `parts` outside of it.
        arrived: parameters whose gradient has arrived, reduced or not.
    Of the accumulation:
        carried: this rank's sum over micro-batches, of the size of `group.full`, which waits for
            the last one (stages 0 and 1).
        is_fresh: the group's `OptimizerShard` holds a gradient.
        received: parameters that got a gradient on this rank, of any size.
    """

    parts: dict[int, torch.Tensor | None] = field(default_factory=dict)
    flat: torch.Tensor | None = None
    apart: int = 0
    arrived: set[int] = field(default_factory=set)
    carried: torch.Tensor | None = None
    is_fresh: bool = False
    received: set[int] = field(default_factory=set)


@dataclass(eq=False, repr=False)
class GradientReducer:
    """Collects each group's gradients in one flat buffer, reduces it over ranks and adds it to the
    optimizer's shard.

    Args:
        shards: where the reduced gradients go, one for each trainable group.
        bucket_size: the most elements in all reductions in flight, unless one is larger.
        overlap: whether backward continues during a reduction, or waits for it immediately.
        contiguous: whether gradients are copied to the flat buffer when `MOST_APART` elements are
            ready, or only when the group has all of them.
        dtype: the dtype in which gradients are sent. None: the dtype of the parameters, or
            `sum_dtype` for sums of micro-batches.
        sum_dtype: in which the result is kept, and summed over micro-batches.
        narrow: a result to which nothing is added stays in the dtype of the reduction, which loses
            nothing.
        deferred: gradients of several micro-batches are summed in a buffer of full size and of
            `sum_dtype` before they are sent (stages 0 and 1). Otherwise the gradients of each
            micro-batch are reduced immediately.

    Attributes:
        backwards: how many have ended since the last step.
        earlier_backwards: how many had ended in the steps before, as all ranks have agreed.
        buffered: elements in flat buffers.
    """

    comm: Communicator
    shards: InitVar[Sequence[OptimizerShard]]
    micro_batches: MicroBatches
    _: KW_ONLY
    bucket_size: int
    overlap: bool
    contiguous: bool
    dtype: torch.dtype | None = None
    sum_dtype: torch.dtype = torch.float32
    narrow: bool = False
    deferred: bool = False

    def __post_init__(self, shards: Sequence[OptimizerShard]) -> None:
        self._shards = {shard.group: shard for shard in shards}
        self.gradients: dict[ParamGroup, GroupGradients] = defaultdict(GroupGradients)
        self._in_flight: deque[_Reduction] = deque()
        self._offloading: deque[tuple[OptimizerShard, Pending]] = deque()
        self.buffered = self.backwards = self.earlier_backwards = 0

    def end_backward(self) -> None:
        """Wait for all reductions of the backward."""
        self.drain()
        self.backwards += 1

    def collect(self, group: ParamGroup, index: int) -> None:
        """Take the gradient that autograd put on the group's parameter number `index`."""
        param = group.params[index]
        assert param.grad is not None, group.describe()
        grad = local(param.grad)
        param.grad = None
        if grad.is_sparse:
            grad = grad.to_dense()
        entry = self.gradients[group]
        entry.received.add(index)
        if index in entry.parts:  # a second one: reentrant checkpointing of shared weights
            earlier = entry.parts[index]
            if earlier is None and entry.flat is not None:
                earlier = self._place(group, entry.flat, index)
            assert earlier is not None
            grad = earlier + grad
        entry.parts[index] = grad
        entry.apart += grad.numel()
        if self.contiguous and entry.apart > MOST_APART:
            self._flatten(group, entry)

    def _flatten(self, group: ParamGroup, entry: GroupGradients) -> torch.Tensor:
        """Copy what is kept apart to the group's flat buffer, in one call."""
        if entry.flat is None:
            entry.flat = self._flat(group)
        apart = {index: grad for index, grad in entry.parts.items() if grad is not None}
        if apart:
            places = [self._place(group, entry.flat, index) for index in apart]
            torch._foreach_copy_(places, list(apart.values()))
        entry.parts.update(dict.fromkeys(apart))
        entry.apart = 0
        return entry.flat

    def collect_rest(self) -> list[ParamGroup]:
        """Before a step: take gradients that the script itself has put on parameters. Returns the
        groups of which this rank has gradients that are not reduced: these, or late ones.

        They are added to the gradients of backward passes. With a loss scale, they must be scaled
        like those.
        """
        rest = []
        for group in self._shards:
            entry, factor = self.gradients[group], self.micro_batches.factor
            if entry.parts and factor != 1.0:
                self._flatten(group, entry).mul_(factor)
            with torch._C.DisableTorchFunctionSubclass():  # sharded parameters look at each access
                given = [i for i, param in enumerate(group.params) if param.grad is not None]
            for index in given:
                self.collect(group, index)
            if entry.parts:
                rest.append(group)
        self.micro_batches.factor = 1.0
        return rest

    def reduce(self, group: ParamGroup) -> None:
        """Start to reduce the collected gradients of `group` times the factor of the current
        backward. Parameters without a gradient count as zero.
        """
        factor = self.micro_batches.factor * group.comm.share
        entry = self.gradients[group]
        flat = self._flatten(group, entry)
        missing = set(range(len(group.params))).difference(entry.parts)
        rest = [self._place(group, flat, index) for index in sorted(missing)]
        if zeros := rest + [flat[start:end] for start, end in group.layout.gaps]:
            torch._foreach_zero_(zeros)
        if factor != 1.0:
            flat.mul_(factor)
        entry.parts = {}
        entry.flat = None  # a sum takes the place of its buffer
        entry.apart = 0
        if self.deferred:
            if entry.carried is not None:
                self.buffered -= flat.numel()
                flat = entry.carried.add_(flat)
            if self.keeps_on_rank:
                entry.carried = flat.to(self.sum_dtype)
                if not entry.is_fresh:
                    group.wait_until_computed()  # which reads the gradient of the step before
                    self._shards[group].grad = None
                return
        self._start(group, flat)
        entry.carried = None

    def _start_carried(self, group: ParamGroup) -> None:
        """Reduce the sum over micro-batches, if there is one."""
        entry = self.gradients[group]
        if (carried := entry.carried) is not None:
            entry.carried = None
            self._start(group, carried)

    def _start(self, group: ParamGroup, flat: torch.Tensor) -> None:
        # the update of the step before reads the buffer that is about to be written
        group.wait_until_computed()
        comm = group.training_comm
        if self.dtype is not None and comm.world_size > 1:
            flat = flat.to(self.dtype)  # a sum of micro-batches is rounded once
        shard, accumulate = self._shards[group], self.gradients[group].is_fresh
        dtype = self._kept_dtype(flat.dtype, accumulate)
        if accumulate:
            # The sum so far may not be complete, or not be written to its tier yet.
            while any(each.shard is shard for each in self._in_flight):
                self._wait_oldest()
            while any(each is shard for each, _ in self._offloading):
                self._wait_for_offload()
            shard.widen_gradient(dtype)
        is_result = comm.world_size == 1 and flat.dtype == dtype
        if is_result and not (shard.offloads_gradient and accumulate):
            # A world of one has nothing to exchange: the flat buffer is the result.
            if accumulate:
                assert shard.grad is not None
                flat = shard.grad.add_(flat)
            self.gradients[group].is_fresh = True
            self._finish(_Reduction(shard, flat.numel(), flat, Pending()))
            return
        room = self.bucket_size - flat.numel()
        while self._in_flight and sum(each.numel for each in self._in_flight) > room:
            self._wait_oldest()
        out = shard.reduction_target(dtype, accumulate)
        exchange = comm.reduce if group.layout.replicated else comm.reduce_scatter
        with label(f"reduction of {group.name}"):
            pending = exchange(out, flat, accumulate, group)
        self.gradients[group].is_fresh = True
        self._in_flight.append(_Reduction(shard, flat.numel(), out, pending))

    def _kept_dtype(self, reduced: torch.dtype, accumulate: bool) -> torch.dtype:
        if self.narrow and not accumulate and self.micro_batches.reduces_now:
            return min(reduced, self.sum_dtype, key=lambda dtype: dtype.itemsize)
        return self.sum_dtype

    def keep_up(self) -> None:
        """Wait for what has started, unless backward goes on meanwhile."""
        while self._in_flight and not self.overlap:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        with self.comm.clock.waiting("reduce"):
            self._in_flight[0].pending.wait()
        self._finish(self._in_flight.popleft())

    def _finish(self, reduction: _Reduction) -> None:
        self.buffered -= reduction.numel
        if len(self._offloading) == 2:
            self._wait_for_offload()
        with label("gradients out"):
            written = reduction.shard.put_gradient(reduction.out)
        if reduction.shard.offloads_gradient:
            self._offloading.append((reduction.shard, written))

    @property
    def keeps_on_rank(self) -> bool:
        """Whether `reduce` only adds to this rank's sum: a later micro-batch is reduced with it."""
        return self.deferred and not self.micro_batches.reduces_now

    def reduce_rest(self, group: ParamGroup) -> None:
        """Before a step: reduce what still waits for a last micro-batch; zero where no backward
        gave a gradient.
        """
        self._start_carried(group)
        if not (entry := self.gradients[group]).is_fresh:
            entry.is_fresh = True
            shard = self._shards[group]
            zeros = shard.reduction_target(self.sum_dtype, accumulate=False).zero_()
            self._finish(_Reduction(shard, 0, zeros, Pending()))

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Context of backwards whose gradients are reduced at its end.

        Every rank must run the same number of them.
        """
        deferred, self.deferred = self.deferred, True
        try:
            yield
            for group in sorted(self.gradients, key=lambda group: group.serial):
                self._start_carried(group)
            self.drain()
        finally:
            self.deferred = deferred

    def drain(self) -> None:
        """Wait for all reductions in flight."""
        while self._in_flight:
            self._wait_oldest()
        while self._offloading:
            self._wait_for_offload()

    def without_gradient(self) -> Iterator[str]:
        """Names of the parameters that have got no gradient on this rank since the last step."""
        for group in self._shards:
            received = self.gradients[group].received
            if len(received) < len(group.params):
                yield from (n for i, n in enumerate(group.param_names) if i not in received)

    def _wait_for_offload(self) -> None:
        """A write that has failed is an error until `clear`: its gradient is lost."""
        with self.comm.clock.waiting("gradients out"):
            self._offloading[0][1].wait()
        self._offloading.popleft()

    def drop_collected(self) -> None:
        """Free gradients whose reduction has not started, because they are of no use."""
        for entry in self.gradients.values():
            entry.parts.clear()

    def clear(self) -> None:
        """Forget all gradients; the next ones are written over them."""
        while self._in_flight:
            self._in_flight.popleft().pending.wait()
        while self._offloading:
            with suppress(OSError):  # nobody needs what was not written
                self._offloading.popleft()[1].wait()
        is_one_backward = self.micro_batches.managed and self.micro_batches.steps == 1
        for group, shard in self._shards.items():
            shard.norms.clear()
            if self.deferred and self.gradients[group].is_fresh and not is_one_backward:
                # until the last micro-batch, `carried` has the sum of this rank's gradients
                shard.grad = None
            self.gradients[group] = GroupGradients()
        self.buffered = self.backwards = 0

    def free(self) -> None:
        """Forget all gradients, and free their memory."""
        self.clear()
        for shard in self._shards.values():
            shard.grad = None

    def _flat(self, group: ParamGroup) -> torch.Tensor:
        dtype, shard, entry = self.dtype or group.dtype, self._shards[group], self.gradients[group]
        is_alone = entry.carried is None and self.micro_batches.reduces_now
        if self.deferred and not is_alone:  # a part of a sum, which is rounded later
            dtype = max(group.dtype, dtype, key=lambda dtype: dtype.itemsize)
        self.buffered += group.layout.padded
        last = shard.grad
        is_result = group.comm.world_size == 1 and is_alone and not entry.is_fresh
        if is_result and last is not None and last.dtype == dtype and not shard.offloads_gradient:
            # In a world of one the buffer becomes the gradient. So the last step's is written over:
            # new memory would cost more than the copy.
            group.wait_until_computed()
            return last
        flat = torch.empty(group.layout.padded, dtype=dtype, device=self.comm.device)
        return on_huge_pages(flat)

    @staticmethod
    def _place(group: ParamGroup, flat: torch.Tensor, index: int) -> torch.Tensor:
        slot = group.layout.slots[index]
        return flat.narrow(0, slot.offset, slot.numel).view(slot.shape)


class ReductionOrder:
    """Follows the gradients of one backward at a time and starts reductions in the agreed order.

    Order of calls in a backward: `begin`, `before_use` whenever a group is about to be used,
    `collect` for each gradient, `complete` for each group that has all of them, `leave` for each
    that no rank uses any more, `finish`. Each but `collect` can be repeated if memory was not
    enough for it.

    Attributes:
        is_open: whether a backward has begun, and is not finished.
    """

    def __init__(self, groups: Sequence[ParamGroup], reducer: GradientReducer, comm: Communicator):
        self._groups = list(groups)
        self._reducer = reducer
        self._comm = comm
        # Their parameters are used all over the model, or at both of its ends. Below stage 3 all
        # groups are persistent, and nothing is gathered in backward: then no group has to come
        # last.
        last = {group for group in groups if group.persistent or group.shared}
        self._last = last if len(last) < len(groups) else set()
        self._order = sorted(
            (group for group in reversed(groups) if group.trainable), key=self._last.__contains__
        )
        # Complete groups in the order in which they became so, each with the number of group uses
        # before that.
        self._complete: dict[ParamGroup, int] = {}
        self._places: dict[ParamGroup, int] | None = None
        self._left: set[ParamGroup] = set()
        self._gathers = comm.world_size > 1 and len(last) < len(groups)
        self._has_places = comm.matches_by_order or self._gathers
        self._started = self._uses = 0
        self._number = 1  # of the backward that runs
        self.is_open = False
        self._late: list[ParamGroup] | None = None
        # Whether a backward of this rank has ever run another one, as reentrant checkpointing does,
        # and whether all ranks know that some rank's has.
        self.has_nested_backward = self.expects_nested_backward = False
        self._absent = frozenset()

    def begin(self, absent: Collection[ParamGroup] = frozenset()) -> None:
        """A backward begins.

        Groups in `absent` get no gradients on any rank, and are not reduced.
        """
        self._uses = 0
        # Not from a count of its own, which a backward that only one rank has not ended would leave
        # different from that of the other ranks, also after `zero_grad`.
        self._number = self._reducer.earlier_backwards + self._reducer.backwards + 1
        self.is_open = True
        self._absent = absent

    def before_use(self) -> None:
        """A group is about to be used, and others prefetched: reductions that all ranks start
        before that start now.
        """
        if self.is_open:
            places = self._places
            while places is not None and self._started < len(self._order):
                if places[self._order[self._started]] > self._uses:
                    break
                self._start_next()
            self._uses += 1

    def collect(self, group: ParamGroup, index: int) -> bool:
        """Take the gradient of the group's parameter number `index`; whether the group has all of
        its gradients now.
        """
        self._reducer.collect(group, index)
        arrived = self._reducer.gradients[group].arrived
        arrived.add(index)
        return len(arrived) == len(group.params)

    def complete(self, group: ParamGroup) -> None:
        """The group has all of its gradients: its reduction starts as soon as those before it have
        started.
        """
        self._complete[group] = self._uses
        self._start_all()

    def leave(self, group: ParamGroup) -> None:
        """Autograd has left the call that uses the group, on all ranks."""
        if self._places is None and self._gathers and group not in self._last:
            self._left.add(group)
            self._start_all()

    def _start_all(self) -> None:
        while self._started < len(self._order) and self._may_start(self._order[self._started]):
            self._start_next()

    def _may_start(self, group: ParamGroup) -> bool:
        if group in self._absent:
            return True
        if self._places is None:
            return group in (self._left if self._gathers else self._complete)
        return group in self._complete and self._places[group] <= self._uses

    def _start_next(self) -> None:
        if self._order[self._started] not in self._absent:
            self._reducer.reduce(self._order[self._started])
        self._started += 1
        self._reducer.keep_up()

    def missing(self) -> Iterator[str]:
        """Names of the trainable parameters without a gradient in this backward."""
        for group in (group for group in self._order if group not in self._absent):
            arrived = self._reducer.gradients[group].arrived
            for i, name in enumerate(group.param_names):
                if group.params[i].requires_grad and i not in arrived:
                    yield name

    def finish(self) -> None:
        """The backward is over: reduce the rest, the same groups in the same order on every rank,
        and wait.
        """
        started, gradients = self._order[: self._started], self._reducer.gradients
        late = {group for group in started if gradients[group].parts}
        while self._started < len(self._order):
            self._start_next()
        if self._late is None:
            self._late = self._late_on_any_rank(late)
        while self._late:
            self._reducer.reduce(self._late[0])
            del self._late[0]
        self._reducer.end_backward()
        self._take_over_order()

    def _late_on_any_rank(self, late: Collection[ParamGroup]) -> list[ParamGroup]:
        """The groups that on any rank got gradients after their reduction had started, for example
        from the second call of a module inside a reentrant checkpoint. All ranks reduce these once
        more.

        Only a backward inside a backward can produce them, so all others need no exchange. Whether
        any rank has had one, all of them ask in backward 1, 2, 4, 8, ...; what is late before that
        waits for the next reduction of its group, or for the step."""
        is_late = [group in late for group in self._order]
        if self._comm.world_size > 1 and not self._reducer.keeps_on_rank:
            if not (self.expects_nested_backward or self._exchanges_now):
                return []
            # Another rank may have waited for these reductions before it came here.
            self._reducer.drain()
            flags = torch.tensor([self.has_nested_backward, *is_late], device="cpu").float()
            self.expects_nested_backward, *is_late = (self._comm.all_reduce(flags) > 0).tolist()
        return [group for group, each in zip(self._order, is_late, strict=True) if each]

    @property
    def _exchanges_now(self) -> bool:
        """Whether this is backward 1, 2, 4, 8, ..."""
        return self._number & (self._number - 1) == 0

    def _take_over_order(self) -> None:
        """After backward 1, 2, 4, 8, ...: take over rank 0's order and places. See the notes."""
        if self._comm.world_size > 1 and self._exchanges_now:
            places = {group: n for group, n in self._complete.items() if group not in self._last}
            rest = [group for group in self._order if group not in places]
            places |= {group: sys.maxsize if group in self._last else self._uses for group in rest}
            numbers = {group: i for i, group in enumerate(self._groups)}
            pairs = [[numbers[group], place] for group, place in places.items()]
            told = torch.tensor(pairs, device="cpu")
            self._comm.broadcast(told, src=0)
            agreed = {self._groups[i]: place for i, place in told.tolist()}
            self._order = list(agreed)
            if self._has_places:
                self._places = agreed
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of a backward that is over, or that ended in an exception."""
        self._complete.clear()
        self._left.clear()
        self._started = 0
        self.is_open = False
        self._late = None
        for entry in self._reducer.gradients.values():
            entry.arrived.clear()
