"""Parts of the training state that lie in host memory for a while, for a script that needs the device's memory.

Values never change. Until they are back nothing may be computed with them; saving is allowed. This file knows nothing
of the step.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from zero.device import is_accelerator
from zero.errors import UsageError
from zero.offload.tiers import Tier
from zero.optim.step import ZeroOptimizer
from zero.unit import Unit

# By DeepSpeed's names. Weights: of a unit that is gathered for use, its shard; else all of it. In fp32 training masters
# are the weights, and go with them. Of the last one there is nothing here between two backwards.
MOMENTS, MASTERS, WEIGHTS, GRADIENTS, BUCKET = (
    *("optim_states", "hp_params", "lp_params", "lp_grads"),
    "contiguous_grad_buffer",
)
STATES = (MOMENTS, MASTERS, WEIGHTS, GRADIENTS, BUCKET)


class Relocation:
    """Moves the states of `units`, which no forward, backward or step uses meanwhile.

    Attributes: away: the names of the states that are on the host. What the configuration keeps there anyway stays.
    """

    def __init__(self, units: Collection[Unit], optimizer: ZeroOptimizer | None, device: torch.device):
        self.units, self.optimizer, self.here = units, optimizer, Tier(device)
        self.away: set[str] = set()

    def refuse_absent(self, what: str) -> None:
        """UsageError if `what` cannot be done now."""
        if self.away:
            raise UsageError(f"{what}: {', '.join(sorted(self.away))} are offloaded; call engine.reload_states() first")

    def send(self, names: Collection[str] | None, pinned: bool) -> None:
        """Move these states to host memory, page-locked if `pinned` and there is a device to copy from; None: all."""
        wanted = set(STATES if names is None else names)
        if unknown := wanted - set(STATES):
            raise UsageError(f"offload_states: {sorted(unknown)[0]!r} is none of {', '.join(STATES)}")
        host = Tier(torch.device("cpu"), pinned and is_accelerator(self.here.device))
        self._move(wanted - self.away, host)
        self.away |= wanted

    def bring_back(self) -> None:
        """Move everything that is away to the compute device."""
        self._move(self.away, self.here)
        self.away = set()

    def _move(self, names: set[str], tier: Tier) -> None:
        if WEIGHTS in names:
            shards = {} if self.optimizer is None else self.optimizer.shards
            for unit in self.units:
                shards.get(unit, unit).move_weights(tier)
        if self.optimizer is None:
            return
        self.optimizer.move(tier, gradients=GRADIENTS in names, masters=MASTERS in names, moments=MOMENTS in names)
