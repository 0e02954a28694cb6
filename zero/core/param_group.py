"""One group: parameters that are unsharded and resharded as one, and the legal transitions between
their states.

`zero/core/gathering.py` says when. The optimizer's part of a group is its `OptimizerShard`, which
says when the shard has the values of the last step.

[Note: states]
    SHARDED    --all_gather-->           GATHERING  `full` has memory, the all-gather is started
    GATHERING  --wait_for_all_gather-->  GATHERED   `full` has the values; parameters show NaN
    GATHERED   --unshard-->              UNSHARDED  parameters are views of `full`; a user is added
    UNSHARDED  --release-->              GATHERED   the last use is over; parameters show NaN again
    any        --reshard-->              SHARDED    the memory of `full` is freed, unless a module
                                                    keeps views of it

`unshard` makes all missing transitions. A persistent group is always UNSHARDED.

[Note: storage under autograd] `full` stays the same tensor from forward to backward. Resharding
empties its *storage* (`untyped_storage().resize_(0)`), and the next all-gather refills the same
storage. Tensors that autograd saved during forward, such as `weight.t()`, are views of that
storage. They are valid again whenever backward unshards the group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from zero.comm.clock import label
from zero.comm.communicator import Communicator, on_huge_pages
from zero.comm.fingerprint import NamedGroup
from zero.comm.work import Pending
from zero.core.layout import GroupLayout, GroupPlan
from zero.core.quantized_weights import wraps_tensors
from zero.core.schedule import Residency
from zero.core.sharded_param import (
    ReadHook,
    hide,
    local,
    owner_of,
    placeholder,
    set_owner,
    show,
    take_over,
)
from zero.errors import UsageError
from zero.offload.tiers import HostTrimmer, Tier

_trimmer = HostTrimmer()
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class State(Enum):
    """What memory a group holds, and what its parameters show."""

    SHARDED = "only the shard is in memory; parameters show NaN"
    GATHERING = "the all-gather into `full` is under way; parameters show NaN"
    GATHERED = "`full` has the values, which are not in use; parameters show NaN"
    UNSHARDED = "`full` has the values; parameters are views of it"


class _Form(NamedTuple):
    """What a parameter looks like while it shows its values. A packed one keeps its strides, for
    example those of a transposed matrix, because kernels depend on them.
    """

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None


class LateUpdates(Protocol):
    """Updates masters, perhaps after the step; see `zero.optim.background`.

    Attributes:
        number: grows with each step, and when an update fails.
    """

    number: int

    def wait(self, shard: Any) -> None:
        """Block until the shard's update is computed, and raise what went wrong."""
        ...


class Optimized(Protocol):
    """The optimizer's part of a group, as the group knows it; see `OptimizerShard`."""

    master: torch.Tensor
    sub_groups_left: int
    updates: LateUpdates
    settled: int

    @property
    def shares_weights(self) -> bool: ...

    def wait_until_computed(self) -> None: ...

    def wait_until_written(self) -> None: ...

    def wait(self) -> None: ...

    def take_new_weights(self) -> dict[int, torch.Tensor]: ...

    def shard_was_replaced(self) -> None: ...


def owning_group(param: torch.Tensor) -> ParamGroup | None:
    """The group that holds the values of `param`; None for an ordinary parameter."""
    return owner_of(param)


class ParamGroup(NamedGroup):
    """Parameters that are unsharded, reduced and resharded as one.

    Attributes:
        shard: 1-D, compute dtype, this rank's slice on `tier`.
        full: 1-D, compute dtype, all values with padding; its storage is empty while the group is
            sharded.
        views: of `full`, one for each parameter, which shows it while the group is unsharded.
        shard_range: the shard's start and end in `full`.
        pieces: which part of each parameter is in the shard.
        users: how many callers need the parameters now.
        version: counts changes of the values.
        serial: order of creation, equal on all ranks.
        has_aliases: a module keeps views of the weights: `full` keeps its memory, and gets the
            values of each step, which these views show.
        strict: a change of unsharded values that would be lost is an error.
        packed: the parameters are frozen tensors of any dtypes, and elements of the group are their
            bytes. Some are not an `nn.Parameter`.
        training_comm: gathers it for use and reduces its gradients; it may quantize.
        source: the communicator that gathered `full`.
        initial_master: the slice as given, on `master_tier`, for an optimizer; or None.
    """

    def __init__(
        self,
        plan: GroupPlan,
        comm: Communicator,
        residency: Residency,
        *,
        dtype: torch.dtype | None = None,
        tier: Tier | None = None,
        master_tier: Tier | None = None,
        replicated: bool = False,
        strict: bool = False,
    ):
        self.serial = next(comm.serials)
        self.name = plan.name
        self.params = plan.params
        self.param_names = plan.param_names
        self.modules = plan.modules
        self.shared = plan.shared
        self.packed = packed = plan.packed
        self.strict = strict
        self.comm = self.training_comm = comm
        self.source = comm
        self.residency = residency
        aliases = [plan.aliases.get(param, []) for param in self.params]
        self.index = {
            tensor: i for i, param in enumerate(self.params) for tensor in (param, *aliases[i])
        }
        self._aliases = [
            [alias for alias in of_param if not wraps_tensors(alias)] for of_param in aliases
        ]
        self.dtype = torch.uint8 if packed else dtype or self.params[0].dtype
        self.trainable = self.params[0].requires_grad
        ranks, shown = comm.shard_group, [local(param) for param in self.params]
        shapes = [torch.Size([each.nbytes]) if packed else each.shape for each in shown]
        self.layout = GroupLayout(shapes, ranks.size, replicated)
        self._forms = [self._form(param) for param in self.params]
        self.shard_range = self.layout.shard_range(ranks.rank)
        self.pieces = self.layout.pieces(ranks.rank)
        self.tier = tier or Tier(comm.device)
        # One rank whose shard already lies on the compute device has nothing to gather.
        alone = ranks.size == 1 and self.tier == Tier(comm.device)
        self.persistent = plan.persistent or alone
        self.state = State.SHARDED
        self.users = 0
        self.version = 0
        self.has_aliases = False
        # Set by the optimizer that updates the shard; each all-gather waits for its updates.
        self.optimizer_shard: Optimized | None = None
        # Called when a function needs a sharded parameter's values.
        self.read_hook: ReadHook | None = None
        # Called when a graph that no module's call has made saves a parameter.
        self.graph_hook: Callable[[ParamGroup], None] | None = None
        # How often each parameter was written in place, as torch counts it, when it was last shown.
        self._versions = [0] * len(self.params)
        self._gather = Pending()
        self._handed_over = 0
        # Copies of single parameters outside of `full`, by index; shown while the rest is sharded.
        self._single: dict[int, torch.Tensor] = {}
        self._placeholders = [
            placeholder(form.shape, form.dtype, comm.device) for form in self._forms
        ]
        self._shard_values(master_tier)

    def _shard_values(self, master_tier: Tier | None) -> None:
        """Take the parameters' values over, and keep this rank's slice of them."""
        on_device, values = self.tier == Tier(self.comm.device), self._take_values()
        rounds = self.trainable and torch.promote_types(values.dtype, self.dtype) != self.dtype
        self.master_tier = master_tier
        self.initial_master: torch.Tensor | None = None
        if master_tier is not None and rounds:
            self.initial_master = master_tier.keep(self._own_slice(values))
        values = values.to(self.dtype)
        is_own = self.persistent and on_device
        self.shard = self._own_slice(values) if is_own else self.tier.keep(self._own_slice(values))
        self.full = values
        self._make_views()
        if self.persistent:
            self.residency.persistent += self.layout.numel
            self._show_values()
            self.state = State.UNSHARDED
        else:
            self.full.untyped_storage().resize_(0)
            self._hide_values()

    def __str__(self) -> str:
        names = ", ".join(self.param_names[:2]) + ", ..." * (len(self.params) > 2)
        return f"group {self.name!r} (parameters {names})"

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of a tensor, which has copies of its attributes, belongs to no group."""

    def describe(self) -> str:
        return (
            f"group {self.name!r} ({self.layout.numel} elements) is {self.state.name} with "
            f"{self.users} users"
        )

    # -- values in

    @torch.no_grad()
    def _take_values(self) -> torch.Tensor:
        """Take the parameters over. Returns a flat buffer with their values, in their dtype: rank
        0's values.

        Each parameter's former memory is freed before the next one is read."""
        source = self.dtype if self.packed else self.params[0].dtype
        full = torch.zeros(self.layout.padded, dtype=source, device=self.comm.device)
        sharded_before = True
        for i, (param, slot) in enumerate(zip(self.params, self.layout.slots, strict=True)):
            param.grad = None
            former, target = owning_group(param), full.narrow(0, slot.offset, slot.numel)
            target = self.as_shown(i, target) if self.packed else target
            if former is None:
                sharded_before = False
                target.copy_(local(param).detach().reshape(target.shape))
            else:
                former.hand_over(param, target)
            nan = placeholder(local(param).shape, param.dtype, self.comm.device)
            for tensor in (param, *self._aliases[i]):
                set_owner(tensor, self)
                take_over(tensor, nan)
            _trimmer.freed_elements(slot.numel)
        for tensor in self.index:
            set_owner(tensor, self)
        if not sharded_before:
            self.comm.broadcast(full, src=0)
        return full

    @torch.no_grad()
    def hand_over(self, param: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a parameter's values to `target`, for another group.

        The last one frees this group's memory.
        """
        with self.unsharded():
            target.copy_(local(param).detach().reshape(target.shape))
        self._handed_over += 1
        if self._handed_over < len(self.params):
            return
        if self.persistent:
            self.residency.persistent -= self.layout.numel
        elif self.state is not State.SHARDED:
            self.reshard()
        self.views = []
        self.state = State.SHARDED
        self.shard = self.shard.new_empty(0)
        self.full = self.full.new_empty(0)

    def _form(self, param: torch.Tensor) -> _Form:
        shown, former = local(param), owning_group(param)
        if not self.packed:
            return _Form(shown.shape, self.dtype)
        if former is not None:
            return former._forms[former.index[param]]
        # `empty_like` keeps strides without gaps.
        return _Form(shown.shape, shown.dtype, torch.empty_like(shown, device="meta").stride())

    def as_shown(self, index: int, elements: torch.Tensor) -> torch.Tensor:
        """What parameter number `index` shows: a view of its `elements` (1-D, as in `full`)."""
        shape, dtype, stride = self._forms[index]
        if stride is None:  # the elements may have another dtype than the group
            return elements.view(shape)
        return elements.view(dtype).as_strided(shape, stride)

    def _own_slice(self, full: torch.Tensor) -> torch.Tensor:
        return full[slice(*self.shard_range)]

    # -- the shard

    def parts(self, start: int, end: int) -> Iterator[tuple[str, int, int, slice]]:
        """What elements `start` to `end` of the shard hold of parameters, in order: (name, the
        parameter's elements, the position in the parameter, the range in these elements).
        """
        for piece in self.pieces:
            first, last = max(piece.start, start), min(piece.start + piece.numel, end)
            if first < last:
                numel, position = self.layout.slots[piece.slot].numel, piece.inside - piece.start
                where = slice(first - start, last - start)
                yield self.param_names[piece.slot], numel, position + first, where

    @property
    def is_ready(self) -> bool:
        """Whether the values of the last step are computed.

        They may not be in the shard's file yet.
        """
        return self.optimizer_shard is None or self.optimizer_shard.sub_groups_left <= 0

    def wait_for_update(self) -> None:
        """Block until the shard has the values of the last step. The caller may then change it."""
        shard = self.optimizer_shard
        if shard is not None:
            with self.comm.clock.waiting("optimizer"):
                shard.wait()

    def wait_until_computed(self) -> None:
        """Block until the values of the last step are computed. They may not be in the shard's file
        yet.
        """
        shard = self.optimizer_shard
        if shard is not None and shard.settled != shard.updates.number:
            with self.comm.clock.waiting("optimizer"):
                shard.wait_until_computed()

    @torch.no_grad()
    def write_shard(self, start: int, values: torch.Tensor) -> Pending:
        """Start to round values into the shard from `start` on.

        All ranks call `refresh` in the same step.
        """
        return self.tier.store(self.shard[start : start + values.numel()], values)

    def _values_change(self) -> None:
        self.version += 1

    def refresh(self) -> None:
        """The shard has new values, so `full` is stale: reshard the group; gather a persistent one
        again, and one whose values a context or views show.
        """
        self._values_change()
        with torch.no_grad():
            for index, values in self._single.items():
                self.gather_range(
                    values.view(-1), self.layout.slots[index].offset, self.shard
                ).wait()
        if self.persistent:
            is_elsewhere = self.shard.device != self.full.device
            if is_elsewhere or self.layout.shard_numel < self.layout.padded:
                with torch.no_grad():
                    self.comm.all_gather(self.full, self.shard, self).wait()
        elif self.users > 0 or self.has_aliases:
            if self.state is State.GATHERING:
                self.wait_for_all_gather()
            self.source = self.comm
            with torch.no_grad():
                self._start_all_gather().wait()
        elif self.state is not State.SHARDED:
            self.reshard()

    @torch.no_grad()
    def broadcast_values(self, src: int) -> None:
        """Make rank `src`'s unsharded values the values of every rank."""
        if self.source is not self.comm:
            raise UsageError(
                f"{self} is in use with rounded values: change weights before forward or after the "
                "step"
            )
        self.comm.broadcast(self.full, src)
        self._store_own_slice()

    def _store_own_slice(self) -> None:
        """Make this rank's slice of `full` the values of the shard and of the optimizer."""
        self.wait_for_update()
        self._values_change()
        self._note_versions()
        own = self._own_slice(self.full)
        if self.shard.data_ptr() != own.data_ptr():
            self.tier.store(self.shard, own).wait()
        if self.optimizer_shard is not None:
            self.optimizer_shard.shard_was_replaced()

    # -- values that a forward writes

    @property
    def has_other_copies(self) -> bool:
        """Whether the values are elsewhere too: in the shard, in a master, or on other ranks."""
        return (
            self.layout.shard_numel < self.layout.padded
            or self.shard.data_ptr() != self.full.data_ptr()
            or (self.optimizer_shard is not None and not self.optimizer_shard.shares_weights)
        )

    @torch.no_grad()
    def take_in_replaced_data(self) -> list[int]:
        """The parameters, by index, whose `param.data` a script has replaced since they were shown.

        The new values are copied to `full`, and the parameters are views of it again. Raises
        UsageError if they have another shape."""
        replaced = []
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            shown = local(param)
            is_view = shown.data_ptr() == view.data_ptr() and shown.stride() == view.stride()
            if is_view or owning_group(param) is not self:
                continue
            values = shown.detach()
            show(param, view)
            is_code = self.packed and values.dtype != view.dtype
            if values.shape != view.shape or is_code:
                raise UsageError(
                    f"parameter {self.param_names[i]!r} had shape {tuple(view.shape)} and "
                    f"{view.dtype}, and has got data of shape {tuple(values.shape)} and "
                    f"{values.dtype}: change them before zero.initialize"
                )
            if values.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
                raise UsageError(
                    f"parameter {self.param_names[i]!r} has got data that is another view of its "
                    "old values, which a backward may still need: assign a clone() of it"
                )
            view.copy_(values)
            replaced.append(i)
        return replaced

    def written_params(self) -> list[int]:
        """The parameters, by index, that were changed in place since they were shown."""
        versions = zip(self.params, self._versions, strict=True)
        return [i for i, (param, version) in enumerate(versions) if param._version != version]

    @torch.no_grad()
    def keep_written_values(self) -> None:
        """Keep what a forward has written to `full`. Every rank must have written the same."""
        self._note_versions()
        if self.source is not self.comm:
            raise UsageError(
                f"the forward changes weights of {self}, which are gathered with rounded values: "
                "delete zero_quantized_weights, or change the weights between two steps inside of "
                "zero.GatheredParameters(param, modifier_rank=0)"
            )
        self._store_own_slice()

    def _note_versions(self) -> None:
        self._versions = [param._version for param in self.params]

    @torch.no_grad()
    def move_weights(self, tier: Tier) -> None:
        """Move the weights to `tier`: the shard, or all of a persistent group. A shard that is its
        own master remains so.
        """
        optimizer_shard = self.optimizer_shard
        is_master = optimizer_shard is not None and optimizer_shard.shares_weights
        if self.persistent:
            self.full = tier.keep(self.full)
            self.shard = self._own_slice(self.full)
            self._make_views()
            # `param.data` cannot change to each kind of device; meanwhile nothing may be computed.
            self._show_values() if tier.device == self.comm.device else self._hide_values()
        else:
            self.shard = tier.keep(self.shard)
            self.tier = tier
        if optimizer_shard is not None and is_master:
            optimizer_shard.master = self.shard

    # -- transitions

    def all_gather(self, by: Communicator | None = None) -> None:
        """SHARDED -> GATHERING: allocate `full` and start the all-gather `by` a communicator, by
        default the group's.
        """
        assert self.state is State.SHARDED, self.describe()
        self.source = by or self.comm
        self.wait_until_computed()
        storage, nbytes = self.full.untyped_storage(), self.layout.padded * self.full.element_size()
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)
            on_huge_pages(self.full)
        with torch.no_grad(), label(f"all-gather of {self.name}"):
            self._gather = self._start_all_gather()
        self.residency.add(self.layout.numel)
        self.state = State.GATHERING

    def _start_all_gather(self) -> Pending:
        """Start to fill `full`: read the shard from its tier, then all-gather.

        If the shard is in a file, only the read starts now, and `wait` starts the all-gather. Reads
        end at different times on different ranks, but all ranks must start their all-gathers in the
        same order."""
        shard = self.optimizer_shard
        new = {} if shard is None else shard.take_new_weights()
        if shard is not None and not new:
            shard.wait_until_written()
        if not self.tier.holds_in_file(self.shard):
            return self.source.all_gather(self.full, self.shard, self)
        own = self._own_slice(self.full)
        parts = [(own[start : start + each.numel()], each) for start, each in new.items()]
        reads = [self.tier.load(*part, lasts=not new) for part in parts or [(own, self.shard)]]
        return Pending(reads, lambda: self.source.all_gather(self.full, own, self).wait())

    def gather_range(self, into: torch.Tensor, start: int, source: torch.Tensor) -> Pending:
        """Start to fill `into` (1-D) with the elements of `full` from `start` on; the group stays
        as it is.

        `source` is each rank's part of them: the shard or the master. `into` may have another
        dtype, the same on all ranks."""
        self.wait_for_update()
        ranks, owned = self.comm.shard_group, []
        for rank in range(ranks.size):
            first, end = self.layout.shard_range(rank)
            low, high = max(first, start), min(end, start + into.numel())
            if low < high:
                owned.append((rank, into[low - start : high - start]))
                if rank == ranks.rank:
                    owned[-1][1].copy_(source[low - first : high - first])
        return Pending() if self.layout.replicated else self.comm.start_broadcasts(owned)

    def wait_for_all_gather(self) -> None:
        """GATHERING -> GATHERED. If the shard cannot be read: an OSError, and -> SHARDED."""
        assert self.state is State.GATHERING, self.describe()
        try:
            with self.comm.clock.waiting("file" if self.tier.file is not None else "gather"):
                self._gather.wait()
        except OSError:
            self._free()
            raise
        self.state = State.GATHERED

    def unshard(self) -> None:
        """Add a user: all-gather if need be, and make the parameters views of `full`."""
        if self.state is State.SHARDED:
            self.all_gather()
        if self.state is State.GATHERING:
            self.wait_for_all_gather()
        if self.state is State.GATHERED:
            self._show_values()
            self.state = State.UNSHARDED
        self.users += 1

    def release(self) -> bool:
        """Remove a user.

        If it was the last one, UNSHARDED -> GATHERED, and return True; never if persistent.
        """
        assert self.users > 0, self.describe()
        self.users -= 1
        if self.users > 0 or self.persistent:
            return False
        self._hide_values()
        self.state = State.GATHERED
        return True

    def reshard(self) -> None:
        """GATHERING, GATHERED or UNSHARDED -> SHARDED: free the memory of `full` if nothing shows
        it.
        """
        assert self.state is not State.SHARDED and not self.persistent, self.describe()
        if self.state is State.GATHERING:
            # Nobody needs the values, unless other ranks wait for this one's part of them.
            is_alone = self.comm.world_size == 1
            with suppress(OSError) if is_alone else nullcontext():
                self.wait_for_all_gather()
        if self.state is State.UNSHARDED:
            self._hide_values()
        if self.state is not State.SHARDED:
            self._free()

    def _free(self) -> None:
        self.residency.remove(self.layout.numel)
        self.state = State.SHARDED
        if self.has_aliases:
            return
        # torch cannot know when a numpy array of it is gone, so such a storage is never freed.
        if (storage := self.full.untyped_storage()).resizable():
            storage.resize_(0)

    def reshard_but_keep_aliases(self) -> None:
        """GATHERED -> SHARDED, but aliases of the parameters (`param.detach()`) keep the values and
        the memory. Views that a module keeps go on showing the group's values.
        """
        assert self.state is State.GATHERED, self.describe()
        if self.has_aliases:
            return self.reshard()
        self.residency.remove(self.layout.numel)
        self.state = State.SHARDED
        with torch.inference_mode(False):
            self.full = torch.empty_like(self.full)
            self._make_views()
        self.full.untyped_storage().resize_(0)

    def unsharded(self) -> AbstractContextManager[None]:
        """Context in which the parameters show their values.

        After it the group has its former state.
        """
        return unsharded([self])

    # -- what the parameters show

    def _make_views(self) -> None:
        """From the next `_show_values` on, parameters are views of the present `full`."""
        self.views = [
            self.as_shown(index, self.full.narrow(0, slot.offset, slot.numel))
            for index, slot in enumerate(self.layout.slots)
        ]

    def _show_values(self) -> None:
        for i, view in enumerate(self.views):
            self._show(i, view)
        self._note_versions()

    def _hide_values(self) -> None:
        """Show NaN, or a single parameter's copy."""
        for i in range(len(self.params)):
            self._hide(i)
        self.show_single(self._single)

    def _show(self, index: int, values: torch.Tensor) -> None:
        if owning_group(self.params[index]) is self:
            show(self.params[index], values)
            for alias in self._aliases[index]:
                show(alias, values)

    def _hide(self, index: int) -> None:
        if owning_group(self.params[index]) is self:
            hide(self.params[index], self._placeholders[index])
            for alias in self._aliases[index]:
                hide(alias, self._placeholders[index])

    # -- single parameters

    @property
    def is_in_use(self) -> bool:
        """Whether unsharded values of this group are in use."""
        return self.users > 0 or bool(self._single)

    def add_single(self, index: int, values: torch.Tensor) -> None:
        """Take `values` (1-D, in memory of their own): after `show_single` parameter number `index`
        shows them.
        """
        self.residency.add(values.numel())
        self._single[index] = self.as_shown(index, values)

    def has_single(self, indices: Iterable[int]) -> bool:
        """Whether each of these parameters is unsharded on its own, outside of `full`."""
        return all(i in self._single for i in indices)

    def show_single(self, indices: Iterable[int]) -> None:
        """Have these parameters show what they were given by `add_single`."""
        for i in indices:
            self._show(i, self._single[i])

    def free_single(self, index: int) -> None:
        """Undo `add_single` and `show_single`."""
        del self._single[index]
        self.residency.remove(self.layout.slots[index].numel)
        if self.state is not State.UNSHARDED:
            self._hide(index)


@contextmanager
def unsharded(groups: Sequence[ParamGroup]) -> Iterator[None]:
    """Context in which all parameters of `groups` show their values. Groups that were sharded are
    resharded at its end.

    The values are exact, unless a forward uses the group with quantized values.
    """
    for group in groups:
        if group.source is not group.comm and group.users == 0 and group.state is not State.SHARDED:
            group.reshard()
    with ExitStack() as held:
        for number, group in enumerate(groups):
            # The next all-gather runs while this one is waited for.
            for each in groups[number : number + 2]:
                if each.state is State.SHARDED:
                    held.callback(_reshard, each)
                    each.all_gather()
            group.unshard()
            held.callback(group.release)
        yield


def _reshard(group: ParamGroup) -> None:
    """A context that has gathered the group is over."""
    if group.state is State.GATHERING:  # the all-gather of another group has failed
        group.wait_for_all_gather()
    if group.state is State.GATHERED:
        group.reshard_but_keep_aliases()
        if group.comm.device.type == "cpu":
            _trimmer.freed_elements(group.layout.numel)


@torch.no_grad()
def checksums(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """A 64-bit number for each tensor's values, on the tensors' device."""
    return torch.stack([_checksum(local(each).detach().reshape(-1)) for each in values])


def _checksum(flat: torch.Tensor) -> torch.Tensor:
    # Most of it as numbers of the sum's dtype, which takes a tenth of the time.
    rest = flat.nbytes % 8 // flat.element_size()
    most, last = flat.split([flat.numel() - rest, rest])
    return most.view(torch.int64).sum() + last.view(_INTEGERS[last.element_size()]).sum()
