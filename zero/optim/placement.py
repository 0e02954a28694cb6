"""Which groups' optimizer state is offloaded and which stays on the compute device
(`offload_optimizer.ratio`), and the names of the states that a script may move itself.

Results do not depend on either."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zero.core.optimizer_shard import OptimizerShard
from zero.core.param_group import ParamGroup
from zero.errors import UsageError
from zero.offload.tiers import Tier

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
