"""Moves parts of the training state to host memory and back, for a script that needs the device's
memory meanwhile.

Values never change. Until they are back, nothing may be computed with them. Saving is allowed. This
file knows nothing of the step."""

from __future__ import annotations

from collections.abc import Collection

import torch

from zero.core.micro_batches import MicroBatches
from zero.core.param_group import ParamGroup
from zero.device import is_accelerator
from zero.errors import UsageError
from zero.offload.tiers import Tier
from zero.optim.sharded_optimizer import ZeroOptimizer

# DeepSpeed's names. WEIGHTS are the shard of a group, or all of a persistent group. In fp32
# training the masters are the weights, and move with them. BUCKET is accepted, but there is no such
# buffer here between two backwards.
MOMENTS, MASTERS, WEIGHTS, GRADIENTS, BUCKET = (
    *("optim_states", "hp_params", "lp_params", "lp_grads"),
    "contiguous_grad_buffer",
)
STATES = (MOMENTS, MASTERS, WEIGHTS, GRADIENTS, BUCKET)


class Relocation:
    """Moves the states of `groups`, which no forward, backward or step uses meanwhile.

    `micro_batches.offloaded` has the names of the states that are on the host now. State that the
    configuration offloads stays where it is."""

    def __init__(
        self,
        groups: Collection[ParamGroup],
        optimizer: ZeroOptimizer | None,
        device: torch.device,
        micro_batches: MicroBatches,
    ):
        self.groups = groups
        self.optimizer = optimizer
        self._device = Tier(device)
        self._micro_batches = micro_batches

    def send(self, names: Collection[str] | None, pinned: bool) -> None:
        """Move these states to host memory, page-locked if `pinned` and there is a device to copy
        from; None: all.
        """
        wanted = set(STATES if names is None else names)
        if unknown := wanted - set(STATES):
            raise UsageError(
                f"offload_states: {sorted(unknown)[0]!r} is none of {', '.join(STATES)}"
            )
        host = Tier(torch.device("cpu"), pinned and is_accelerator(self._device.device))
        self._move(wanted - self._micro_batches.offloaded, host)
        self._micro_batches.offloaded |= wanted

    def bring_back(self) -> None:
        """Move everything back to the compute device."""
        self._move(self._micro_batches.offloaded, self._device)
        self._micro_batches.offloaded = set()

    def _move(self, names: set[str], tier: Tier) -> None:
        if WEIGHTS in names:
            shards = {} if self.optimizer is None else self.optimizer.shards
            for group in self.groups:
                shards.get(group, group).move_weights(tier)
        if self.optimizer is None:
            return
        self.optimizer.move(
            tier, gradients=GRADIENTS in names, masters=MASTERS in names, moments=MOMENTS in names
        )
