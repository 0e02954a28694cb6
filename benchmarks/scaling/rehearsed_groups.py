"""Groups of parameters without values, and where the engine would put them, as `rehearsal` needs
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import NamedTuple

from zero.config import Config
from zero.core.layout import GroupLayout, GroupPlan
from zero.core.param_group import State
from zero.core.schedule import Residency
from zero.offload.tiers import LEAST_BYTES_IN_A_FILE
from zero.tools.estimate.machine import DEVICE, DISK, HOST

# As much of a communicator as `Gathering` sees.
NO_COMMUNICATOR = SimpleNamespace(
    watchdog=SimpleNamespace(set_position=lambda group: None),
    clock=SimpleNamespace(progress=SimpleNamespace(advance=lambda total: None)),
    world_size=2,
)


class CountedGroup:
    """As much of a group as `Gathering` sees: it counts all-gathers in `gathers`, and moves
    nothing.
    """

    def __init__(self, layout: GroupLayout, persistent: bool, residency: Residency):
        self.layout = layout
        self.persistent = persistent
        self.residency = residency
        self.state = State.SHARDED
        self.users = 0
        self.is_ready = True
        self.gathers = 0

    def all_gather(self, by: object) -> None:
        self.state = State.GATHERING
        self.gathers = self.gathers + 1
        self.residency.add(self.layout.numel)

    def unshard(self) -> None:
        self.state = State.UNSHARDED
        self.users = self.users + 1

    def release(self) -> bool:
        self.users -= 1
        if not self.users:
            self.state = State.GATHERED
        return not self.users

    def reshard(self) -> None:
        self.state = State.SHARDED
        self.residency.remove(self.layout.numel)


class Home(NamedTuple):
    """Where the weights of a group live between their uses, and what the optimizer keeps of it."""

    weights: str
    optimizer: str


def homes(
    plans: Sequence[GroupPlan], layouts: Sequence[GroupLayout], config: Config
) -> Iterator[Home]:
    """The home of each group. Of weights for files, the first `max_in_cpu` elements of a rank stay
    in host memory.

    With a `ratio`, the first groups that fit stay on the device, as `place_shards` decides.
    """
    zero, item, master = (
        config.zero_optimization,
        config.compute_dtype.itemsize,
        2 if config.bf16.without_masters else 4,
    )
    in_memory = (
        zero.offload_param.max_in_cpu
        if zero.offloads_params and zero.offload_param.device == "nvme"
        else 0
    )
    trained = [plan.params[0].requires_grad for plan in plans]
    ratio = zero.offload_optimizer.ratio if zero.offloads_optimizer and zero.stage else 0.0
    stays = sum(
        layout.shard_numel for layout, trains in zip(layouts, trained, strict=True) if trains
    )
    stays = 0 if ratio == "auto" else (1 - ratio) * stays
    for plan, layout, trains in zip(plans, layouts, trained, strict=True):
        in_memory -= layout.numel // layout.world_size
        weights = optimizer = DEVICE
        if zero.offloads_params and zero.stage == 3 and not plan.persistent:
            weights = place(zero.offload_param.device, layout.shard_numel * item)
            weights = HOST if in_memory >= 0 else weights
        if trains and layout.shard_numel <= stays:
            stays -= layout.shard_numel
        elif trains:
            optimizer = place(zero.offload_optimizer.device, layout.shard_numel * master)
        yield Home(weights, optimizer)


def place(device: str, nbytes: float) -> str:
    """Where a tensor of this size is offloaded to: small ones stay in host memory."""
    return DISK if device == "nvme" and nbytes >= LEAST_BYTES_IN_A_FILE else HOST
