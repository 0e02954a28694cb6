"""What the optimizer keeps of one group on this rank: the master, the reduced gradient, and where
they live.

    gradient  in:  `reduction_target` -> a reduction fills it -> `put_gradient`      (by
                   `zero.core.reduction`)
    master    out: `round_into_shard` for each updated piece (by `zero.optim.background`, or for
                   whole tensors `whole_tensor`), and `group.refresh` (by `sharded_optimizer`)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import torch

from zero.comm.work import Pending
from zero.core.param_group import LateUpdates, ParamGroup
from zero.errors import UsageError
from zero.offload.tiers import Tier


class OptimizerShard:
    """This rank's part of a group's optimization.

    Attributes:
        tier: where master and optimizer state live, and gradient_tier: where the gradient does.
        master: 1-D, fp32 unless bf16 is configured, or None before `make_master`; if the group's
            shard has that dtype and is in the same place, it is the master.
        grad: 1-D, the reduced gradient in the dtype of the reducer's sums, or None. `grad` times
            `comm.mean_factor` is the mean over ranks.
        sub_groups_left: pieces of the master that the last step still has to update, and
            update_end: the end of their update on the device, or None; whoever updates masters
            keeps both (`zero.optim.background`).
        norms: 2-norms (scalars) of the pieces of an offloaded gradient, by the piece's start. They
            are computed on the compute device before the gradient leaves it.
        writes: the last update is complete when these are.
        handed_out: how often somebody has got the values, perhaps to change them.
        new_weights: pieces of the updated weights that are still in host memory, by their start,
            for the next all-gather.
        settled: the number of the last updates of all masters that were complete for this shard.
    """

    def __init__(self, group: ParamGroup, tier: Tier, gradient_in_memory: bool = False):
        self.group = group
        self.tier = tier
        self.gradient_tier = tier.in_memory() if gradient_in_memory else tier
        # Nobody asks for these two before `make_master`, nor after `free`.
        self.master: torch.Tensor = None  # pyright: ignore[reportAttributeAccessIssue]
        self.updates: LateUpdates = None  # pyright: ignore[reportAttributeAccessIssue]
        self.grad: torch.Tensor | None = None
        self.norms: dict[int, torch.Tensor] = {}
        self.sub_groups_left = 0
        self.update_end: torch.Event | None = None
        self.settled = 0
        self.writes: list[Pending] = []
        self.new_weights: dict[int, torch.Tensor] = {}
        self.handed_out = 0

    @property
    def is_offloaded(self) -> bool:
        """Whether master and state live on another tier than the compute device."""
        return self.tier != Tier(self.group.comm.device)

    @property
    def offloads_gradient(self) -> bool:
        """Whether the gradient lives on another tier than the compute device."""
        return self.gradient_tier != Tier(self.group.comm.device)

    @property
    def shares_weights(self) -> bool:
        """Whether the master is the group's shard itself."""
        return self.master is self.group.shard

    # -- master

    @torch.no_grad()
    def make_master(self, updates: LateUpdates, dtype: torch.dtype = torch.float32) -> None:
        """Make the master. From now on each all-gather of the group waits for its update by
        `updates`.

        A shard of this dtype in the same place is its own master. So is one in host memory if the
        tier is a file: the weights are in memory anyway. A model in fp32 that is trained in 16 bits
        keeps its fp32 values in the master."""
        shard, initial = self.group.shard, self.group.initial_master
        self.group.initial_master = None
        tier = self.group.tier
        in_another_file = tier.holds_in_file(shard) and tier.file is not self.tier.file
        if shard.dtype == dtype and shard.device == self.tier.device and not in_another_file:
            self.master = shard
        elif initial is not None and self.group.master_tier == self.tier and initial.dtype == dtype:
            self.master = initial
        else:
            self.master = self.tier.keep(shard if initial is None else initial, dtype)
        self.updates = updates
        self.group.optimizer_shard = self

    def free(self) -> None:
        """Free master and gradient: the optimizer has ended."""
        self.group.optimizer_shard = None
        self.master = None  # pyright: ignore[reportAttributeAccessIssue]
        self.grad = None
        self.forget_writes()

    @torch.no_grad()
    def round_into_shard(self, start: int, values: torch.Tensor) -> Pending:
        """Start to write updated values, from element `start` on, to the group's shard, in its
        dtype.
        """
        target = self.group.shard[start : start + values.numel()]
        if self.shares_weights or target.data_ptr() == values.data_ptr():
            return Pending()
        return self.group.write_shard(start, values)

    @torch.no_grad()
    def master_was_replaced(self) -> None:
        """The master has new values from elsewhere: round them into the shard.

        Every rank must call.
        """
        self.wait()
        if not self.shares_weights:
            self.group.write_shard(0, self.master).wait()
        self.group.refresh()

    @torch.no_grad()
    def shard_was_replaced(self) -> None:
        """The group's shard has new values from elsewhere: take them over.

        Elements that are the master's rounded ones were not changed, and stay as precise as they
        were."""
        self.wait()
        if self.master is None or self.shares_weights:
            return
        given = self.group.shard.to(self.master.device)
        values = torch.where(self.master.to(given.dtype) == given, self.master, given)
        self.tier.store(self.master, values).wait()
        self.handed_out += 1  # a read may have begun in between

    # -- gradient

    def reduction_target(self, dtype: torch.dtype, accumulate: bool) -> torch.Tensor:
        """A 1-D buffer of `dtype` on the compute device, of the shard's length, for a reduction to
        write to.

        If `accumulate`, it holds the gradient so far. The caller has waited for the write of that
        gradient."""
        if self.grad is not None and self.grad.dtype == dtype and not self.offloads_gradient:
            return self.grad
        out = torch.empty(self.group.layout.shard_numel, dtype=dtype, device=self.group.comm.device)
        if accumulate:
            assert self.grad is not None
            self.gradient_tier.load(out, self.grad).wait()
        elif not self.offloads_gradient:
            self.grad = out
        return out

    def put_gradient(self, values: torch.Tensor) -> Pending:
        """Keep the reduced gradient `values`, which is on the compute device.

        If offloaded, start to write it out.
        """
        tier = self.gradient_tier
        if not self.offloads_gradient:
            self.grad = values
            return Pending()
        if starts := [piece.start for piece in self.group.pieces]:
            parts = [values[piece.start : piece.start + piece.numel] for piece in self.group.pieces]
            norms = torch._foreach_norm(parts, dtype=torch.float32)
            self.norms.update(zip(starts, norms, strict=True))
        if self.grad is None or self.grad.dtype != values.dtype:
            self.grad = tier.empty(values.numel(), values.dtype)
        return tier.store(self.grad, values)

    def widen_gradient(self, dtype: torch.dtype) -> None:
        """Keep the gradient in `dtype`, because something is about to be added to it or written
        into it.
        """
        if self.grad is not None and self.grad.dtype != dtype:
            self.grad = self.gradient_tier.keep(self.grad, dtype)

    # -- late updates

    def wait_until_computed(self) -> None:
        """Block until the last step's update is computed. It may not be in its files yet."""
        if self.settled != self.updates.number:
            self.updates.wait(self)

    def wait_until_written(self) -> None:
        """Block until the last step's update is computed and written."""
        # Read first: if a thread fails meanwhile, the next wait raises its error.
        number = self.updates.number
        if self.settled == number:
            return
        self.updates.wait(self)
        writes, self.writes = self.writes, []
        for each in writes:
            each.wait()
        # The current stream waits for this event. The next wait may be on another one.
        if self.update_end is None:
            self.settled = number

    def wait(self) -> None:
        """`wait_until_written`. The caller may then change the values."""
        self.wait_until_written()
        self.handed_out += 1
        self.new_weights = {}

    def keep_new_weights(self, start: int, values: torch.Tensor) -> None:
        """The weights are in a file: keep the updated `values`, from element `start` on, in host
        memory until the next all-gather.
        """
        if self.group.tier.holds_in_file(self.group.shard):
            self.new_weights[start] = values

    def take_new_weights(self) -> dict[int, torch.Tensor]:
        """All pieces of the updated weights, by their start, if they are still in host memory; else
        nothing.
        """
        found, self.new_weights = self.new_weights, {}
        is_whole = sum(map(torch.numel, found.values())) == self.group.layout.shard_numel
        return found if is_whole else {}

    def forget_writes(self) -> None:
        """What the last update writes is of no use any more. It must have ended before other values
        are written there.
        """
        for each in self.writes:
            with suppress(OSError):
                each.wait()
        self.writes.clear()
        self.new_weights = {}

    # -- moves

    def move_gradient(self, tier: Tier) -> None:
        if self.grad is not None:
            self.grad = tier.keep(self.grad)


# -- which groups' optimizer state is offloaded and which stays on the compute device
# (`offload_optimizer.ratio`), and the states that a script may move itself; results do not depend
# on either

# What `engine.offload_states` moves, by DeepSpeed's names. WEIGHTS are the shard of a group, or all
# of a persistent group. In fp32 training the masters are the weights, and move with them. The last
# one is accepted, but there is no such buffer here between two backwards.
MOMENTS, MASTERS, WEIGHTS, GRADIENTS = "optim_states", "hp_params", "lp_params", "lp_grads"
STATES = (MOMENTS, MASTERS, WEIGHTS, GRADIENTS, "contiguous_grad_buffer")


def states_named(names: Collection[str] | None) -> set[str]:
    """These of `STATES`, all for None. Raises UsageError for another name."""
    wanted = set(STATES if names is None else names)
    if unknown := wanted - set(STATES):
        raise UsageError(f"offload_states: {sorted(unknown)[0]!r} is none of {', '.join(STATES)}")
    return wanted


def place_shards(
    groups: Sequence[ParamGroup],
    device_tier: Tier,
    offload_tier: Tier,
    ratio: float,
    in_memory: int = 0,
) -> list[OptimizerShard]:
    """The optimizer's part of each group, where it is to live.

    Groups stay on the device from the first one on, as long as they fit: nothing can hide the
    update of the first ones.

    Args:
        groups: in the model's order, which is assumed to be the order of a forward.
        ratio: the fraction to offload, from 0 to 1.
        in_memory: elements of gradients that stay in host memory if `offload_tier` is a file.
    """
    shards = []
    stays = (1 - ratio) * sum(group.layout.shard_numel for group in groups)
    for group in groups:
        numel = group.layout.shard_numel
        fits = numel <= stays
        stays -= numel if fits else 0
        in_memory -= 0 if fits else numel
        tier = device_tier if fits else offload_tier
        shards.append(OptimizerShard(group, tier, gradient_in_memory=in_memory >= 0))
    return shards
