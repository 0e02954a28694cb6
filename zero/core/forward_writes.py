"""Weights that a forward changes in place: they keep the new values, as in plain torch.

`nn.Embedding(max_norm=...)`, a layer that clamps or normalizes its own weight, or a codebook that
follows its inputs writes to a parameter while the parameter is unsharded. Without this file, the
new values would be lost when the group is resharded, or at the next step, where the optimizer has
its own fp32 values.

The same is true of `param.data = tensor`, and of writes between two passes to a parameter that is
always unsharded.

Each rank writes its slice of the new values back, and a digest of all that was written goes into
the comparison of ranks at the step, because ranks that write different values have different
weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from zero.core.param_group import ParamGroup, checksums
from zero.core.sharded_param import cut_of
from zero.errors import UsageError

logger = logging.getLogger("zero")

# Errors show the digest, so it is short.
_DIGESTS = 1 << 22


class ForwardWrites:
    """Detects writes to the weights of `groups` and keeps them.

    torch counts in-place writes to a parameter, but not those to `param.data`. Therefore checksums
    of the values are compared in the first pass that trains and in the first one that does not, and
    between passes until the first step is over. A write that is not counted is an error. Later
    passes compare nothing, because checksums read all weights and make the host wait.

    Attributes:
        digest: of the values written since it was 0; equal on all ranks that wrote the same.
        names: the parameters that were written.
        compares: whether the present pass is one of those that are compared.
    """

    def __init__(self, groups: Sequence[ParamGroup]):
        self._always_shown = [group for group in groups if group.persistent]
        # Of the passes that train (True) and of those that do not: whether one was compared.
        self._compared: set[bool] = set()
        self.compares = False
        self._before: dict[ParamGroup, torch.Tensor] = {}
        self._changed: list[tuple[ParamGroup, torch.Tensor]] = []
        # Until the first step is over: what always shown groups hold while no pass runs, with the
        # version of their values.
        self._is_first_step = True
        self._at_rest: dict[ParamGroup, tuple[int, torch.Tensor]] = {}
        self.digest = 0
        self.names: dict[str, None] = {}

    def __str__(self) -> str:
        return f"{', '.join(self.names) or 'none'} (digest {self.digest})"

    def between_passes(self, trains: bool = True) -> None:
        """Keep what the script has written to parameters that always show their values, before
        the next pass or step puts others there. `trains`: what comes next changes weights.
        """
        changed = []
        for group in self._always_shown:
            # States may be elsewhere, between `offload_states` and `reload_states`.
            if group.full.device != group.comm.device:
                continue
            written = self._keep_new_values(group)
            if trains and (rest := self._at_rest.pop(group, None)) is not None:
                version, before = rest
                if not written and version == group.version:
                    changed.append((group, before != checksums(group.views)))
        _refuse_lost(changed, "the script changes")

    def end_of_step(self) -> None:
        """The parameters have the values of a step, or of the initialization."""
        self._rest()
        self._is_first_step = True not in self._compared

    def begin_pass(self, trains: bool) -> None:
        self.between_passes(trains)
        self.compares = trains not in self._compared
        # Left over from a pass that was abandoned, or in which a context held groups.
        self._before.clear()
        if self.compares:
            for group in self._persistent():
                self.shown(group)

    def shown(self, group: ParamGroup) -> None:
        """The group's parameters show their values from now on."""
        if self.compares and group not in self._before:
            self._before[group] = checksums(group.views)

    def end_use(self, group: ParamGroup) -> None:
        """The group's parameters are about to stop showing their values."""
        before = self._before.pop(group, None)
        if not self._keep_new_values(group) and before is not None:
            self._changed.append((group, before != checksums(group.views)))

    def end_pass(self, has_trained: bool) -> None:
        """A pass is over. `has_trained`: it ended with a backward."""
        for group in self._persistent():
            self.end_use(group)
        changed, self._changed = self._changed, []
        self._compared.add(has_trained)
        _refuse_lost(changed, "the forward changes")
        self._rest()

    def _rest(self) -> None:
        """No pass runs from now on. A write to `.data` would reach no master that is elsewhere."""
        for group in self._always_shown if self._is_first_step else ():
            shard, known = group.optimizer_shard, self._at_rest.get(group)
            is_known = known is not None and known[0] == group.version
            if shard is not None and not shard.shares_weights and not is_known:
                self._at_rest[group] = group.version, checksums(group.views)

    def _persistent(self) -> list[ParamGroup]:
        """The groups that are never resharded, without those that are their own only copy."""
        return [group for group in self._always_shown if group.has_other_copies]

    def _keep_new_values(self, group: ParamGroup) -> bool:
        """Keep what was written to parameters of the group. Returns whether anything was."""
        replaced = group.take_in_replaced_data()
        counted = group.written_params() if group.has_other_copies else []
        written = sorted({*replaced, *counted})
        if not written:
            return False
        if group.packed:
            raise UsageError(
                f"{group.param_names[written[0]]!r} was changed, and quantized weights and sharded "
                "buffers must stay as they are: change it between two steps inside of "
                "zero.GatheredParameters(param, modifier_rank=0), or, if it is a buffer, set "
                "zero_optimization.stage3_shard_buffers to false"
            )
        if group.comm.model is not None or cut_of(group.params[written[0]]) is not None:
            raise UsageError(
                f"parameter {group.param_names[written[0]]!r} was changed in place, which cannot "
                "be kept with tensor, expert or pipeline parallelism: change it between two steps "
                "inside of zero.GatheredParameters(param, modifier_rank=0)"
            )
        for i in written:
            if group.param_names[i] not in self.names:
                self.names[group.param_names[i]] = None
                logger.info("%r was written to: its new values are kept", group.param_names[i])
        group.keep_written_values()
        if group.comm.world_size > 1:
            sums = checksums(group.views).sum() + sum(written)
            self.digest = (31 * self.digest + int(sums)) % _DIGESTS
        return True


def _refuse_lost(changed: Sequence[tuple[ParamGroup, torch.Tensor]], who: str) -> None:
    """Raise UsageError if a parameter was written to in a way that torch does not count."""
    if not changed:
        return
    is_changed = torch.cat([flags for _, flags in changed]).tolist()
    names = [name for group, _ in changed for name in group.param_names]
    lost = [name for name, flag in zip(names, is_changed, strict=True) if flag]
    if lost:
        raise UsageError(
            f"{who} {lost[0]!r}{' and others' * (len(lost) > 1)} through `.data`, which cannot be "
            "detected in later passes, so the change would be lost: write to the parameter "
            "itself under torch.no_grad(), or change it between two steps inside of "
            "`zero.GatheredParameters(param, modifier_rank=0)`"
        )
