"""Decides which groups' optimizer state is offloaded and which stays on the compute device
(`offload_optimizer.ratio`). Also has the names of the states that a script may move itself.

This file decides; it moves nothing. A number is the fraction that is offloaded. With "auto"
everything is offloaded at first. After some steps have shown how much memory training takes, as
many groups as fit move to the device, with gradient, master, moments and weights. A reserve stays
free. If more than half of it is used, groups are offloaded again. Later steps show whether they fit
after all. Results do not depend on the placement."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence

import torch

from zero import device
from zero.comm.communicator import Communicator
from zero.core.optimizer_shard import OptimizerShard
from zero.core.param_group import ParamGroup
from zero.errors import UsageError
from zero.offload.tiers import Tier

# Steps that show the peak of memory: the first one makes the optimizer's state, the second one runs
# with it.
STEPS_TO_WATCH = 2
# Steps after a change before groups move to the device again: batches differ in size.
STEPS_TO_RETURN = 50

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


class Placement:
    """Decides for each group where its optimizer's part lives.

    Args:
        groups: the groups in the model's order, which is assumed to be the order of a forward.
        device_tier: the compute device.
        offload_tier: the place to which state is offloaded.
        ratio: the fraction to offload, from 0 to 1, or "auto".

    Groups stay on the device from the first one on, as long as they fit: nothing can hide the
    update of the first ones.

    Attributes:
        shards: one for each group, in the same order.
        offloads: whether anything may be offloaded.
        is_automatic: whether `changes` may find something to move.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        device_tier: Tier,
        offload_tier: Tier,
        ratio: float | str,
    ):
        self._device_tier = device_tier
        self._offload_tier = offload_tier
        self.offloads = device_tier != offload_tier
        self.is_automatic = ratio == "auto" and self.offloads
        # Bytes that were free in each step since the last change, and how many steps to wait for
        # the next one.
        self._free: list[int] = []
        self._patience = STEPS_TO_WATCH
        self.shards: list[OptimizerShard] = []
        total = sum(group.layout.shard_numel for group in groups)
        stays = 0 if isinstance(ratio, str) else (1 - ratio) * total
        for group in groups:
            fits = group.layout.shard_numel <= stays
            stays -= group.layout.shard_numel if fits else 0
            self.shards.append(OptimizerShard(group, device_tier if fits else offload_tier))

    def changes(
        self, comm: Communicator, bytes_of: Callable[[OptimizerShard], int]
    ) -> list[tuple[OptimizerShard, Tier]]:
        """At the beginning of a step: what to move, and where to.

        `bytes_of` gives all bytes of a shard.
        """
        # The least of all ranks: they gather in one order, which depends on where weights are.
        room = torch.tensor(device.room(self._device_tier.device), device=comm.device)
        free, total = comm.all_reduce(room, op="min").tolist()
        self._free.append(free)
        reserve, found = max(1 << 30, total // 10), []

        def most_bytes(shards: Sequence[OptimizerShard]) -> list[int]:
            """Of each shard on any rank, so that all ranks move the same ones."""
            own = torch.tensor([-bytes_of(shard) for shard in shards], device=comm.device)
            return (-comm.all_reduce(own, op="min")).tolist()

        kept = [shard for shard in self.shards if shard.tier == self._device_tier]
        if kept and free < reserve // 2:
            freed = most_bytes(kept)
            while kept and free < reserve:
                free += freed.pop()
                found.append((kept.pop(), self._offload_tier))
        elif len(self._free) >= self._patience:
            free, self._patience = min(self._free), STEPS_TO_RETURN
            self._free.clear()
            away = [shard for shard in self.shards if shard.tier != self._device_tier]
            for shard, nbytes in zip(away, most_bytes(away), strict=True):
                if free - nbytes >= reserve:
                    free -= nbytes
                    found.append((shard, self._device_tier))
        if found:
            self._free.clear()
            if comm.job.rank == 0:
                back = (shard for shard, tier in found if tier == self._device_tier)
                self._tell([*kept, *back], free, reserve)
        return found

    def _tell(self, kept: Sequence[OptimizerShard], free: int, reserve: int) -> None:
        numel, total = (
            sum(shard.group.layout.shard_numel for shard in shards)
            for shards in (kept, self.shards)
        )
        print(
            f"zero_optimization.offload_optimizer.ratio: auto is {1 - numel / total:.2f}: "
            f"{len(kept)} of "
            f"{len(self.shards)} groups stay in the memory of {self._device_tier.device}, of which "
            f"{free / 2**30:.1f} GiB are left, {reserve / 2**30:.1f} GiB in reserve",
            file=sys.stderr,
        )
