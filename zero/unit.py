"""One unit: its shard, its gathered buffer, its gradient, and the legal transitions between its states.

[Note: storage under autograd]
`full` is allocated once; releasing it empties its *storage* (`untyped_storage().resize_(0)`) and gathering refills the
same storage. Tensors that autograd saved during forward, such as `weight.t()`, are views of that storage and are valid
again whenever backward gathers the unit. What parameters show between uses: `zero/parameters.py`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import nn

from zero.comm import Communicator, Pending
from zero.layout import UnitLayout
from zero.offload.tiers import HostTrimmer, Tier
from zero.parameters import hide, placeholder, show

if TYPE_CHECKING:
    from zero.optim.step import ZeroOptimizer


class ZeroParamStatus(Enum):
    """What `param.ds_status` says, under DeepSpeed's names: whether a parameter shows its values."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3  # none, while they are being gathered


class State(Enum):
    """What memory a unit holds and what its parameters show."""

    SHARDED = "only the shard; parameters show NaN"
    FETCHING = "full is allocated and being gathered; parameters show NaN"
    RESIDENT = "full is gathered but not in use; parameters show NaN"
    EXPOSED = "full is gathered; parameters are views of it"


@dataclass
class Residency:
    """Counts gathered elements: `persistent` ones apart, `live` now and `peak` so far for all others."""

    persistent: int = 0
    live: int = 0
    peak: int = 0

    def add(self, numel: int) -> None:
        self.live += numel
        self.peak = max(self.peak, self.live)

    def remove(self, numel: int) -> None:
        self.live -= numel


logger = logging.getLogger("zero")


def unit_of(param: torch.Tensor) -> Unit | None:
    """The unit that holds `param`'s values, or None for an ordinary parameter."""
    return getattr(param, "_zero_unit", None)


_param_ids = itertools.count()
_trimmer = HostTrimmer()


class Unit:
    """Parameters that are gathered, reduced and released together.

    Attributes: shard (1-D, compute dtype, this rank's slice), master (1-D fp32 or None; the same tensor as `shard`
    when that is fp32), grad (1-D or None: the reduced gradient of this rank's slice in the dtype of the reducer's sums;
    times `comm.mean_factor` it is the mean over ranks), users (how many callers need the parameters exposed now),
    serial (order of creation, equal on all ranks).
    """

    def __init__(
        self,
        name: str,
        params: Sequence[nn.Parameter],
        comm: Communicator,
        residency: Residency,
        *,
        dtype: torch.dtype | None = None,
        tier: Tier | None = None,
        param_names: Sequence[str] = (),
        modules: Sequence[nn.Module] = (),
        persistent: bool = False,
        shared: bool = False,
        replicated: bool = False,
    ):
        self.serial = next(comm.serials)
        self.name, self.params, self.param_names = name, list(params), list(param_names)
        self.modules, self.shared = list(modules), shared
        self.comm, self.residency = comm, residency
        self.dtype = dtype or self.params[0].dtype
        self.trainable = self.params[0].requires_grad
        # Set by the engine: its optimizer, where that keeps its part, and what to call when a function needs the values
        # of a sharded parameter.
        self.optimizer: ZeroOptimizer | None = None
        self.optimizer_tier = Tier(comm.device)
        self.on_read: Callable[[nn.Parameter, Callable], None] | None = None
        # Set by who makes the unit: whether a change of gathered values that would be lost is an error.
        self.strict = False
        self.layout = UnitLayout([param.shape for param in self.params], comm.world_size, replicated)
        self.tier = self._home = tier or Tier(comm.device)
        on_device = self.tier == Tier(comm.device)
        # One rank whose shard already lies on the compute device has nothing to gather.
        self.persistent = persistent or (comm.world_size == 1 and on_device)
        self.state, self.users = State.SHARDED, 0
        self.index = {param: i for i, param in enumerate(self.params)}
        # Parameters that are unsharded by themselves, in memory of their own, by index.
        self._apart: dict[int, torch.Tensor] = {}
        self.master: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        # Whole parameters that were handed out to be saved, while somebody keeps them and no step has passed.
        self.copies: dict[nn.Parameter, Callable[[], torch.Tensor | None]] = {}
        self._pending, self._given_up = Pending(), 0
        self._writes: list[Pending] = []
        if self.persistent:
            self.full = self._take_values()
            self.shard = self._own_slice(self.full) if on_device else self._keep_own_slice(self.full)
        else:
            self.shard = self._keep_own_slice(self._take_values())
            self.full = torch.empty(self.layout.padded, dtype=self.dtype, device=comm.device)
        self._views = self._make_views()
        self._placeholders = [placeholder(slot.shape, self.dtype, comm.device) for slot in self.layout.slots]
        self._label_parameters()
        if self.persistent:
            residency.persistent += self.layout.numel
            self._show_values()
            self.state = State.EXPOSED
        else:
            self.full.untyped_storage().resize_(0)
            self._show_placeholders()

    def _make_views(self) -> list[torch.Tensor]:
        return [self.full.narrow(0, slot.offset, slot.numel).view(slot.shape) for slot in self.layout.slots]

    def _label_parameters(self) -> None:
        """Give the parameters the attributes by which DeepSpeed's users know sharded ones.

        `ds_tensor` is this rank's part of the parameter, 1-D and possibly empty, and `partition_numel()` its size. Of a
        parameter that is a unit by itself it is the shard, with its padding: there a new `ds_tensor.data` takes effect
        too.
        """
        for param in self.params:
            if not hasattr(param, "ds_id"):
                param.ds_id = next(_param_ids)
            param.ds_numel, param.ds_shape, param.ds_persist = param.numel(), param.shape, self.persistent
            param.ds_tensor = self.shard[:0]
        for piece in self.layout.pieces(self.comm.rank):
            self.params[piece.slot].ds_tensor = self.shard[piece.start : piece.start + piece.numel]
        if len(self.params) == 1:
            # A persistent shard is a part of `full`, and must stay one.
            self.params[0].ds_tensor = self.shard[:] if self.persistent else self.shard
        for param in self.params:
            param.partition_numel = functools.partial(int, param.ds_tensor.numel())  # no reference to the shard

    # -- values in

    @torch.no_grad()
    def _take_values(self) -> torch.Tensor:
        """A flat buffer with the parameters' values, rank 0's where they are ordinary.

        Each parameter's former memory is let go before the next one is read. Only this rank's slice of the result
        counts unless the unit is persistent.
        """
        source = self.params[0].dtype
        full = torch.zeros(self.layout.padded, dtype=source, device=self.comm.device)
        sharded_before = True
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            param.grad = None
            former, target = unit_of(param), full.narrow(0, slot.offset, slot.numel)
            sharded_before &= former is not None
            if former is not None and former.optimizer is not None:
                logger.warning("%s goes to a new engine: the one that trained it so far must not be used again", former)
            if former is not None:
                with former.exposed():
                    target.copy_(param.data.reshape(-1))
                former.give_up()
            else:
                target.copy_(param.data.reshape(-1))
            param._zero_unit = self
            show(param, placeholder(slot.shape, source, self.comm.device))
            _trimmer.freed_elements(slot.numel)
        if not sharded_before:
            if self.persistent:
                self.comm.broadcast(full, src=0)
            else:
                self.comm.scatter(self._own_slice(full), full, src=0)
        if self.dtype == source:
            return full
        return full.to(self.dtype)

    def _own_slice(self, full: torch.Tensor) -> torch.Tensor:
        return full[slice(*self.layout.shard_range(self.comm.rank))]

    def _keep_own_slice(self, full: torch.Tensor) -> torch.Tensor:
        return self.tier.keep(self._own_slice(full))

    @torch.no_grad()
    def make_master(self, tier: Tier) -> None:
        """Make the fp32 copy that the optimizer updates, on `tier`; an fp32 shard that is there is its own master.

        So is one in memory where `tier` is a file: the weights are in memory anyway.
        """
        self.optimizer_tier = tier
        source = self.shard if self.master is None else self.master
        elsewhere = self.tier.holds_in_file(source) and self.tier.file is not tier.file
        if source.dtype == torch.float32 and source.device == tier.device and not elsewhere:
            self.master = source
        else:
            self.master = tier.keep(source, torch.float32)

    @torch.no_grad()
    def move(self, tier: Tier) -> None:
        """Bring gradient, master and weights to `tier`, or the weights to where they began."""
        if self.grad is not None:
            self.grad = tier.keep(self.grad)
        shares = self.master is self.shard
        if not self.persistent:
            home = tier if tier == Tier(self.comm.device) else self._home
            self.shard, self.tier = home.keep(self.shard), home
            self._label_parameters()
        self.master = self.shard if shares and self.tier == tier else tier.keep(self.master)
        self.optimizer_tier = tier

    @torch.no_grad()
    def move_weights(self, tier: Tier) -> None:
        """Bring what holds the weights between steps to `tier`; of a persistent unit that is all of it."""
        if self.persistent:
            self.full.data = tier.keep(self.full)
            self.shard.data = self._own_slice(self.full)
            self._views = self._make_views()
            self._show_values()
        else:
            self.shard.data, self.tier = tier.keep(self.shard), tier
        self._label_parameters()

    def wait_for_update(self) -> None:
        """Until the optimizer has made what it still has to make of the last step for this unit."""
        with self.comm.clock.waiting("optimizer"):
            if self.optimizer is not None:
                self.optimizer.wait(self)
            writes, self._writes = self._writes, []
            for each in writes:
                each.wait()

    @torch.no_grad()
    def publish(self, start: int, values: torch.Tensor) -> Pending:
        """Start to round updated values into the shard, from `start` on; what was gathered before is stale."""
        target = self.shard[start : start + values.numel()]
        if self.master is self.shard or target.data_ptr() == values.data_ptr():
            return Pending()
        return self.tier.store(target, values)

    @property
    def is_late(self) -> bool:
        """Whether the optimizer has still to update it."""
        return self.optimizer is not None and self.optimizer.is_late(self)

    def forget_writes(self) -> None:
        """Wait for none of the writes under way: they failed, or their result is not wanted any more."""
        self._writes.clear()

    def is_stored_by(self, writes: Pending) -> None:
        """`writes` make the last update complete; whoever needs the unit waits for them."""
        self._writes.append(writes)

    @torch.no_grad()
    def publish_master(self) -> None:
        """Round the updated master into the shard and drop what was gathered from the old one."""
        if self.master is not self.shard:
            self.tier.store(self.shard, self.master).wait()
        self.invalidate()

    @torch.no_grad()
    def write_back(self, src: int) -> None:
        """Make rank `src`'s exposed values the values of every rank."""
        self.copies.clear()
        if self.persistent:
            self.comm.broadcast(self.full, src)
            self.shard.copy_(self._own_slice(self.full))
        else:
            own = self._own_slice(self.full)
            self.comm.scatter(own, self.full, src)
            self.tier.store(self.shard, own).wait()
        if self.master is not None and self.master is not self.shard:
            self.optimizer_tier.store(self.master, self.shard).wait()

    def give_up(self) -> None:
        """One more parameter goes to another unit; with the last one all memory is let go."""
        self._given_up += 1
        if self._given_up < len(self.params):
            return
        if self.persistent:
            self.residency.persistent -= self.layout.numel
        elif self.state is not State.SHARDED:
            self.free()
        self.state, self.shard, self.master, self.grad, self.full, self._views = (
            State.SHARDED,
            None,
            None,
            None,
            None,
            [],
        )

    # -- transitions

    def fetch(self) -> None:
        """SHARDED -> FETCHING: allocate `full` and start gathering."""
        assert self.state is State.SHARDED, self.describe()
        self.wait_for_update()
        self._allocate()
        self.residency.add(self.layout.numel)
        with torch.no_grad():
            self._pending = self._gather()
        self._set_status(ZeroParamStatus.INFLIGHT)
        self.state = State.FETCHING

    def _gather(self) -> Pending:
        """Start to fill `full`: from the shard's tier, then from other ranks.

        What comes from a file is waited for before other ranks are told: no rank knows when another one has read.
        """
        if not self.tier.holds_in_file(self.shard):
            return self.comm.all_gather(self.full, self.shard, self)
        own = self._own_slice(self.full)
        read = self.tier.load(own, self.shard)
        return Pending([read], lambda: self.comm.all_gather(self.full, own, self).wait())

    def arrive(self) -> None:
        """FETCHING -> RESIDENT: wait for the gather."""
        assert self.state is State.FETCHING, self.describe()
        with self.comm.clock.waiting("file" if self.tier.file is not None else "gather"):
            self._pending.wait()
        self._set_status(ZeroParamStatus.NOT_AVAILABLE)
        self.state = State.RESIDENT

    def expose(self) -> None:
        """RESIDENT -> EXPOSED: make the parameters views of `full`."""
        assert self.state is State.RESIDENT, self.describe()
        self._show_values()
        self.state = State.EXPOSED

    def conceal(self) -> None:
        """EXPOSED -> RESIDENT: make the parameters NaN; `full` stays for a later use."""
        assert self.state is State.EXPOSED and not self.persistent, self.describe()
        self._show_placeholders()
        self.state = State.RESIDENT

    def free(self) -> None:
        """FETCHING, RESIDENT or EXPOSED -> SHARDED: really free the memory of `full`."""
        if self.state is State.FETCHING:
            self.arrive()
        if self.state is State.EXPOSED:
            self.conceal()
        assert self.state is State.RESIDENT, self.describe()
        self.full.untyped_storage().resize_(0)
        self.residency.remove(self.layout.numel)
        self.state = State.SHARDED

    def free_but_for_aliases(self) -> None:
        """As `free`, but what others made of the parameters' values (`param.detach()`) keeps them and their memory."""
        if self.state is State.EXPOSED:
            self.conceal()
        self.residency.remove(self.layout.numel)
        self.state = State.SHARDED
        with torch.inference_mode(False):
            self.full = torch.empty_like(self.full)
            self._views = self._make_views()
        self.full.untyped_storage().resize_(0)

    # -- single parameters

    @torch.inference_mode(False)
    @torch.no_grad()
    def fetch_parts(self, indices: Iterable[int]) -> Pending:
        """Start to gather single parameters into memory of their own, for `show_parts`; the unit stays as it is."""
        works = []
        for i in indices:
            slot = self.layout.slots[i]
            values = torch.empty(slot.numel, dtype=self.dtype, device=self.comm.device)
            works.append(self.gather_range(values, slot.offset, self.shard))
            self.residency.add(slot.numel)
            self._apart[i] = values.view(slot.shape)
        return Pending(works)

    @property
    def is_shown(self) -> bool:
        """Whether somebody holds unsharded values of this unit."""
        return self.users > 0 or bool(self._apart)

    def shows(self, indices: Iterable[int]) -> bool:
        """Whether each of these parameters is unsharded by itself."""
        return all(i in self._apart for i in indices)

    def show_parts(self, indices: Iterable[int]) -> None:
        """Have these parameters show what `fetch_parts` has gathered."""
        for i in indices:
            show(self.params[i], self._apart[i])
            self.params[i].ds_status = ZeroParamStatus.AVAILABLE

    def hide_parts(self, indices: Iterable[int]) -> None:
        """Undo `fetch_parts` and `show_parts`."""
        for i in indices:
            self.residency.remove(self._apart.pop(i).numel())
            if self.state is not State.EXPOSED and unit_of(self.params[i]) is self:
                hide(self.params[i], self._placeholders[i])
                self.params[i].ds_status = ZeroParamStatus.NOT_AVAILABLE

    def gather_range(self, into: torch.Tensor, start: int, source: torch.Tensor) -> Pending:
        """Start to fill `into` (1-D) with what the unsharded unit has from element `start` on, out of ranks' `source`.

        `source` is the shard or the master; `into` may have another dtype, the same on all ranks.
        """
        self.wait_for_update()
        owned: list[tuple[int, torch.Tensor]] = []
        for rank in range(self.comm.world_size):
            first, end = self.layout.shard_range(rank)
            low, high = max(first, start), min(end, start + into.numel())
            if low < high:
                owned.append((rank, into[low - start : high - start]))
                if rank == self.comm.rank:
                    owned[-1][1].copy_(source[low - first : high - first])
        return Pending() if self.layout.replicated else self.comm.start_broadcasts(owned)

    def invalidate(self) -> None:
        """The shard has new values: drop or renew what was gathered."""
        self.copies.clear()
        if self.persistent:
            self.refresh()
        elif self.state is not State.SHARDED:
            self.free()

    def refresh(self) -> None:
        """Gather a persistent unit's values again, in place."""
        if self.layout.shard_numel < self.layout.padded or self.shard.device != self.full.device:
            with torch.no_grad():
                self.comm.all_gather(self.full, self.shard, self).wait()

    def exposed(self) -> _Exposed:
        """Context in which the parameters show their values, gathered if need be and left as they were found."""
        return _Exposed([self])

    def acquire(self) -> None:
        """One more user: gather if need be and expose."""
        self.users += 1
        if self.state is State.SHARDED:
            self.fetch()
        if self.state is State.FETCHING:
            self.arrive()
        if self.state is State.RESIDENT:
            self.expose()

    def leave(self) -> bool:
        """One user less; whether it was the last one. The caller then conceals or frees."""
        assert self.users > 0, self.describe()
        self.users -= 1
        return self.users == 0 and not self.persistent

    def _allocate(self) -> None:
        self.full.untyped_storage().resize_(self.layout.padded * self.full.element_size())

    def _show_values(self) -> None:
        for param, view in zip(self.params, self._views, strict=True):
            if unit_of(param) is self:
                show(param, view)
        self._set_status(ZeroParamStatus.AVAILABLE)

    def _show_placeholders(self) -> None:
        for param, nan in zip(self.params, self._placeholders, strict=True):
            if unit_of(param) is self:
                hide(param, nan)
        self._set_status(ZeroParamStatus.NOT_AVAILABLE)
        self.show_parts(self._apart)

    def _set_status(self, status: ZeroParamStatus) -> None:
        for param in self.params:
            if unit_of(param) is self:
                param.ds_status = status

    def __str__(self) -> str:
        names = ", ".join(self.param_names[:2]) + ", ..." * (len(self.params) > 2)
        return f"unit {self.name!r} (parameters {names})"

    def describe(self) -> str:
        return f"unit {self.name!r} ({self.layout.numel} elements) is {self.state.name} with {self.users} users"


class _Exposed:
    """Acquires units on entry and frees on exit those nobody else uses."""

    def __init__(self, units: Sequence[Unit]):
        self.units = units

    def __enter__(self) -> None:
        self.kept = [unit.state is not State.SHARDED for unit in self.units]
        for number, unit in enumerate(self.units):
            for each in self.units[number : number + 2]:  # the next one is on its way while this one is waited for
                if each.state is State.SHARDED:
                    each.fetch()
            unit.acquire()

    def __exit__(self, *exc_info: object) -> None:
        for unit, keep in zip(self.units, self.kept, strict=True):
            if unit.leave():
                unit.conceal()
                if not keep:
                    unit.free_but_for_aliases()
                    if unit.comm.device.type == "cpu":
                        _trimmer.freed_elements(unit.layout.numel)
