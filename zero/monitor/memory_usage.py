"""Counts the bytes that an engine holds on this rank, by place and kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from zero.engine import ZeroEngine
from zero.offload.tiers import Tier

DEVICE, HOST, DISK = "device", "host", "disk"
PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, BUFFERS = (
    "parameters", "gathered parameters", "gradients", "optimizer", "buffers",
)  # fmt: skip


def bytes_by_kind(engine: ZeroEngine) -> dict[str, dict[str, int]]:
    """Bytes by place ("device", "host", "disk"), then by kind. On a machine without an accelerator
    there is no device.

    "buffers" are the model's, and those in which gradients are collected and reduced. Nothing is
    waited for."""
    found: dict[str, Counter[str]] = {DEVICE: Counter(), HOST: Counter(), DISK: Counter()}
    seen: set[tuple[int, int]] = set()
    for kind, tensor, tier in _tensors(engine):
        key = tensor.data_ptr(), tensor.nbytes
        if tensor.nbytes and key not in seen:
            seen.add(key)
            in_file = tier is not None and tier.holds_in_file(tensor)
            found[DISK if in_file else place_of(tensor.device)][kind] += tensor.nbytes
    if engine.optimizer is not None:
        carried = sum(tensor.numel() for tensor in _carried(engine))
        item = (engine.reducer.dtype or engine.settings.compute_dtype).itemsize
        buffered = (engine.reducer.buffered - carried) * item
        found[place_of(engine.comm.device)] += Counter({BUFFERS: buffered})
    return {place: dict(kinds) for place, kinds in found.items() if kinds}


def place_of(device: torch.device) -> str:
    return HOST if device.type == "cpu" else DEVICE


def _carried(engine: ZeroEngine) -> list[torch.Tensor]:
    """This rank's sums of gradients that wait for a last micro-batch."""
    sums = (each.carried for each in engine.reducer.gradients.values())
    return [tensor for tensor in sums if tensor is not None]


def _tensors(engine: ZeroEngine) -> Iterator[tuple[str, torch.Tensor, Tier | None]]:
    """(kind, tensor, the tier that may have it) of everything that the engine keeps; some come
    twice.
    """
    for group in engine.groups:
        if group.persistent:
            yield PARAMETERS, group.full, group.tier
        else:
            yield PARAMETERS, group.shard, group.tier
            if group.full.untyped_storage().nbytes():
                yield GATHERED, group.full, None
    yield from ((BUFFERS, buffer, None) for buffer in engine.module.buffers())
    if engine.optimizer is None:
        return
    tiers = set()
    for shard in engine.optimizer.shards.values():
        tiers.add(shard.tier)
        if shard.master is not None and not shard.shares_weights:
            yield OPTIMIZER, shard.master, shard.tier
        if shard.grad is not None:
            yield GRADIENTS, shard.grad, shard.tier
    yield from ((GRADIENTS, tensor, None) for tensor in _carried(engine))
    for entry in list(engine.reducer.gradients.values()):  # of a backward that runs
        parts = list(entry.parts.values())
        yield from ((GRADIENTS, part, None) for part in parts if part is not None)
    # A late update may change the state meanwhile: copies of its lists can still be read.
    in_file = next((tier for tier in tiers if tier.file is not None), None)
    for state in list(engine.optimizer.optimizer.state.values()):
        yield from (
            (OPTIMIZER, value, in_file)
            for value in list(state.values())
            if isinstance(value, torch.Tensor)
        )
