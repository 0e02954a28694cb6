"""Second shards (ZeRO++ hpZ, arXiv 2306.10209): all-gathers after a step's first one stay within a
group of ranks.

The first all-gather after an update is among all ranks. Each rank keeps 1/k of the gathered group
on its device, where k is the size of its group. Until the next update, all-gathers are among the
group. Each gives the same bits."""

from __future__ import annotations

from typing import Any

import torch

from zero.comm.communicator import Communicator
from zero.comm.work import Pending
from zero.core.param_group import ParamGroup
from zero.offload.tiers import Tier


class SecondaryPartitionGroup(ParamGroup):
    """A `ParamGroup` sharded over the ranks of `comm`, and a second time over the k ranks of
    `group_comm.shard_group`.

    Attributes:
        second: 1-D, of the compute dtype, `layout.padded / k` elements; None until a first
            all-gather and after a change of the values. A quantized second shard is not used for
            exact all-gathers.
    """

    def __init__(self, *args: Any, group_comm: Communicator, **options: Any):
        self._group_comm = group_comm
        self.second: torch.Tensor | None = None
        self._second_source: object = None
        super().__init__(*args, **options)

    def _start_all_gather(self) -> Pending:
        if self.second is not None and self._second_source is self.source:
            return self._group_comm.all_gather(self.full, self.second, self)
        return super()._start_all_gather()

    def wait_for_all_gather(self) -> None:
        super().wait_for_all_gather()
        if self.second is None:
            self._second_source = self.source
            with torch.inference_mode(False), torch.no_grad():
                ranks = self._group_comm.shard_group
                self.second = self.full.view(ranks.size, -1)[ranks.rank].clone()

    # -- changes of the values

    def _values_change(self) -> None:
        self.second = None
        super()._values_change()

    def move_weights(self, tier: Tier) -> None:
        self.second = None
        super().move_weights(tier)

    def hand_over(self, param: torch.Tensor, target: torch.Tensor) -> None:
        super().hand_over(param, target)
        self.second = None
