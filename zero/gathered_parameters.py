"""`GatheredParameters`: a context in which sharded parameters show their values.

If more than half of a group is requested, or if it is to be changed, all of it is unsharded in one
all-gather. Otherwise only the requested parameters are gathered, by broadcasts. This file knows
nothing about engines or optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import nn

from zero.comm.control import Record
from zero.comm.work import Pending
from zero.core.param_group import ParamGroup, State, checksums, owning_group, unsharded
from zero.core.sharded_param import holders_of
from zero.errors import UsageError

logger = logging.getLogger("zero")


@torch.inference_mode(False)
@torch.no_grad()
def _gather_single(group: ParamGroup, index: int, held: ExitStack) -> Pending:
    """Start to gather a single parameter into memory of its own, until `held` is closed; the group
    stays sharded.
    """
    slot = group.layout.slots[index]
    values = torch.empty(slot.numel, dtype=group.dtype, device=group.comm.device)
    pending = group.gather_range(values, slot.offset, group.shard)
    group.add_single(index, values)
    held.callback(group.free_single, index)
    held.callback(pending.wait)
    return pending


def _use_count(param: nn.Parameter) -> int:
    return cast(Any, param)._use_count()  # which torch's stubs lack


class GatheredParameters:
    """A context in which sharded parameters have their full values on every rank.

    All ranks must enter it, with the same parameters.

    Args:
        params: a parameter, several parameters, or a module, whose parameters are gathered.
            Ordinary parameters among them are left alone.
        modifier_rank: the rank whose changes all ranks receive when the context ends. With None you
            may only read: changes are lost, with a warning, or with a RuntimeError if
            `zero_optimization.enable_sanity_checks` is set. At stage 3, unless the values are in
            use already, it is an error if ranks give different ones.
        fwd_module: accepted for compatibility. Whatever a forward uses is gathered anyway.
        enabled: whether the context does anything.
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
        asked: dict[ParamGroup, set[int]] = {}
        for param in params if enabled else ():
            if (group := owning_group(param)) is not None:
                # Tensors of a packed group decode each other.
                indices = range(len(group.params)) if group.packed else [group.index[param]]
                asked.setdefault(group, set()).update(indices)
        # In order of creation, which is the same on all ranks; that of `params` may not be (HF
        # passes sets).
        self.asked = {
            group: sorted(asked[group]) for group in sorted(asked, key=lambda group: group.serial)
        }
        self.modifier_rank = modifier_rank
        self._is_divided = False
        for group, indices in self.asked.items():
            divided = [i for i in indices if holders_of(group.params[i]) is not None]
            self._is_divided |= bool(divided)
            if modifier_rank is not None and divided:
                raise UsageError(
                    f"GatheredParameters: each rank has a part of "
                    f"{group.param_names[divided[0]]!r} (expert_parallel), so no rank can write "
                    "all of it: use zero.fragments.safe_set_full_fp32_param instead of "
                    "modifier_rank"
                )
            ranks = range(group.comm.world_size)
            if modifier_rank is not None and modifier_rank not in ranks:
                raise UsageError(
                    f"GatheredParameters: modifier_rank is {modifier_rank}, and the ranks are 0 to "
                    f"{ranks[-1]}"
                )

    def __enter__(self) -> None:
        # What is in use already, a rank may read alone; and ranks have different experts.
        is_there = all(group.persistent or group.is_in_use for group in self.asked)
        if not (is_there or self._is_divided):
            self._agree_on_writes("entering GatheredParameters")
        single = {group: self._one_by_one(group, indices) for group, indices in self.asked.items()}
        writes = self.modifier_rank is not None
        whole = (group for group in self.asked if not single[group])
        with ExitStack() as held:
            pending = [
                _gather_single(group, index, held)
                for group, indices in single.items()
                for index in indices
            ]
            held.enter_context(
                unsharded(
                    [group for group in whole if writes or not group.has_single(self.asked[group])]
                )
            )
            for each in pending:
                each.wait()
            for group, indices in single.items():
                group.show_single(indices)
            sharded = [group for group in self.asked if not group.persistent]
            params = [group.params[i] for group in sharded for i in self.asked[group]]
            self._group_versions = {group: group.version for group in self.asked}
            # Graphs that save a parameter hold it.
            self._holders = {param: _use_count(param) for param in params}
            # torch counts no writes to `param.data`.
            self._sums = checksums(params) if params and not writes else None
            self._held = held.pop_all()

    def _one_by_one(self, group: ParamGroup, indices: Sequence[int]) -> list[int]:
        """The parameters to be gathered one by one: those that are only read, and make up at most
        half of a sharded group.
        """
        if self.modifier_rank is not None or group.state is not State.SHARDED or group.persistent:
            return []
        if 2 * sum(group.layout.slots[i].numel for i in indices) > group.layout.numel:
            return []
        return [i for i in indices if not group.has_single([i])]

    def __exit__(self, exc_type: type | None, *exc_info: object) -> None:
        changed: list[str] = []
        try:
            if exc_type is None:
                self._keep_for_graphs()
                if self.modifier_rank is not None:
                    self._agree_on_writes("leaving GatheredParameters", self.asked)
                    for group in self.asked:
                        group.broadcast_values(self.modifier_rank)
                changed = self._lost()
        finally:
            self._held.close()
        if self.modifier_rank is not None and exc_type is None:
            for group in self.asked:
                if not group.persistent:
                    group.refresh()  # somebody else may have gathered it
        if changed:
            message = (
                f"GatheredParameters: modification of {', '.join(changed[:5])}"
                f"{' and others' * (len(changed) > 5)}, which is lost with modifier_rank=None; "
                "pass the rank whose values all ranks are to take over (modifier_rank=0)"
            )
            if any(group.strict for group in self.asked):
                raise RuntimeError(message)
            logger.warning(message)

    def _keep_for_graphs(self) -> None:
        """Keep groups gathered, of which a graph has been made here that saves weights: its
        backward takes them from the parameters.
        """
        grown = (each for each, count in self._holders.items() if _use_count(each) > count)
        groups = {group for param in grown if (group := owning_group(param)) is not None}
        for group in sorted(groups, key=lambda group: group.serial):
            if group.graph_hook is not None:
                group.graph_hook(group)

    def _agree_on_writes(self, when: str, written: Iterable[ParamGroup] = ()) -> None:
        """Take in what the script has put in place of the data of parameters of `written`. What is
        refused on one rank is an error of all, which would wait for its values otherwise. So are
        different modifier ranks.
        """

        def take_in() -> Record:
            for group in written:
                group.take_in_replaced_data()
            return Record({"modifier_rank": str(self.modifier_rank)})

        comm = next((group.comm for group in self.asked), None)
        if comm is None or comm.model is not None:  # ranks have different parts of the model
            take_in()
        else:
            comm.control(when).require_same(take_in)

    def _lost(self) -> list[str]:
        """Names of the parameters that were changed here, and not by a context inside of this one,
        or a step, that has given the change to all ranks.
        """
        if self._sums is None:
            return []
        params = list(self._holders)
        differs = (checksums(params) != self._sums).tolist()
        found = []
        for param, is_changed in zip(params, differs, strict=True):
            group = owning_group(param)
            if is_changed and group is not None and group.version == self._group_versions[group]:
                found.append(group.param_names[group.index[param]])
        return found
