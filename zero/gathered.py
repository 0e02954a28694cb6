"""`GatheredParameters`: a context in which sharded parameters show their values.

If more than half of a unit is asked for, or if it is to be changed, all of it is unsharded in one all-gather. Otherwise
only the parameters that are asked for are gathered, by broadcasts. This file knows nothing of hooks or the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from zero.pending import Pending
from zero.unit import State, Unit, unit_of, unsharded

logger = logging.getLogger("zero")


def gather_range(unit: Unit, into: torch.Tensor, start: int, source: torch.Tensor) -> Pending:
    """Start to fill `into` (1-D) with the elements of the unit's full buffer from `start` on.

    `source` is each rank's part of them: the shard or the master. `into` may have another dtype, the same on all ranks.
    """
    unit.wait_for_update()
    ranks, owned = unit.comm.shard_group, []
    for rank in range(ranks.size):
        first, end = unit.layout.shard_range(rank)
        low, high = max(first, start), min(end, start + into.numel())
        if low < high:
            owned.append((rank, into[low - start : high - start]))
            if rank == ranks.rank:
                owned[-1][1].copy_(source[low - first : high - first])
    return Pending() if unit.layout.replicated else unit.comm.start_broadcasts(owned)


@torch.inference_mode(False)
@torch.no_grad()
def _gather_single(unit: Unit, indices: Iterable[int]) -> Pending:
    """Start to gather single parameters into memory of their own; the unit stays sharded."""
    works = []
    for i in indices:
        slot = unit.layout.slots[i]
        values = torch.empty(slot.numel, dtype=unit.dtype, device=unit.comm.device)
        works.append(gather_range(unit, values, slot.offset, unit.shard))
        unit.add_single(i, values)
    return Pending(works)


class GatheredParameters:
    """Context in which sharded parameters show their full values on every rank.

    Args:
        params: a parameter, an iterable of them, or a module; ordinary parameters among them are left alone.
        modifier_rank: the rank whose changes all ranks get on exit; None: the values are only read, and
            changes are lost with a warning, or a RuntimeError with `zero_optimization.enable_sanity_checks`.
        fwd_module: accepted for compatibility; its hooks gather whatever a forward uses.
        enabled: False makes the context do nothing.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter] | nn.Module,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        if isinstance(params, torch.Tensor):
            params = [params]
        elif isinstance(params, nn.Module):
            params = params.parameters()
        asked: dict[Unit, set[int]] = {}
        for param in params if enabled else ():
            if (unit := unit_of(param)) is not None:
                asked.setdefault(unit, set()).add(unit.index[param])
        # In order of creation, which is the same on all ranks; that of `params` may not be (HF passes sets).
        self.asked = {unit: sorted(asked[unit]) for unit in sorted(asked, key=lambda unit: unit.serial)}
        self.modifier_rank = modifier_rank

    def __enter__(self) -> None:
        self._single = {unit: self._one_by_one(unit, indices) for unit, indices in self.asked.items()}
        pending = [_gather_single(unit, indices) for unit, indices in self._single.items()]
        writes = self.modifier_rank is not None
        whole = (unit for unit in self.asked if not self._single[unit])
        self._unsharded = unsharded([unit for unit in whole if writes or not unit.has_single(self.asked[unit])])
        self._unsharded.__enter__()
        for each, (unit, indices) in zip(pending, self._single.items(), strict=True):
            each.wait()
            unit.show_single(indices)
        sharded = [unit.params[i] for unit in self.asked if not unit.persistent for i in self.asked[unit]]
        self._versions = {param: param._version for param in sharded}

    def _one_by_one(self, unit: Unit, indices: Sequence[int]) -> list[int]:
        """The parameters to be gathered one by one: those that are read only, and at most half of a sharded unit."""
        if self.modifier_rank is not None or unit.state is not State.SHARDED or unit.persistent:
            return []
        numel = sum(unit.layout.slots[i].numel for i in indices)
        return [i for i in indices if not unit.has_single([i])] if 2 * numel <= unit.layout.numel else []

    def __exit__(self, exc_type: type | None, *exc_info: object) -> None:
        if self.modifier_rank is not None and exc_type is None:
            for unit in self.asked:
                unit.broadcast_values(self.modifier_rank)
        changed = [param for param, version in self._versions.items() if param._version != version]
        self._unsharded.__exit__(None, None, None)
        for unit, indices in self._single.items():
            unit.free_single(indices)
        if changed and self.modifier_rank is None and exc_type is None:
            message = (
                f"GatheredParameters: in-place modification of {len(changed)} sharded parameter(s), which is lost with "
                "modifier_rank=None; pass the rank whose values all ranks are to take over (modifier_rank=0)"
            )
            if any(unit.strict for unit in self.asked):
                raise RuntimeError(message)
            logger.warning(message)
