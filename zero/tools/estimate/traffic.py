"""What one rank moves in an optimizer step over each link, and the seconds that this takes on links
of given speeds.

[Note: traffic]
network         bytes that the rank sends to others. Of a buffer that an all-gather fills, or that a reduce-scatter
                reads, a rank sends all but one N-th, N being the ranks of the group: this is what a
                ring sends, and what the engine's messages on gloo have. An all-reduce is both.
host to device, device to host
                copies between an accelerator and host memory. On a machine without one there are
                none.
disk read, disk written
                bytes of the rank's own file.

A step has all of its micro-batches. Counted is what grows with the model: not the norm's sum, not
orders on which ranks agree. The engine's counters have the same numbers (`zero/comm/traffic.py`):
`tests/dist/tools/test_estimate.py` compares them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from zero.comm.quantized import message_bytes
from zero.comm.traffic import IN, LINKS, NETWORK, OUT, READ, WRITTEN
from zero.config import Config
from zero.tools.estimate.messages import coded_gradients
from zero.tools.estimate.states import DEVICE, DISK, HOST, Kept, param_groups, updates_whole_tensors
from zero.tools.estimate.updates import whole_tensors

# Speeds that are assumed: a rank's share of each link in bytes/s, of one direction; operations/s of
# a device; elements/s that a rank's share of the CPU updates. `benchmarks/scaling/timeline.py` begins with
# the same.
NETWORK_SPEED, HOST_SPEED, DISK_SPEED, COMPUTE_SPEED, HOST_UPDATE_SPEED = (
    25e9,
    20e9,
    1e9,
    400e12,
    4e8,
)
ASSUMPTION = (
    f"assumed: nothing overlaps; network {NETWORK_SPEED / 1e9:g} GB/s, host {HOST_SPEED / 1e9:g} "
    "GB/s, disk "
    f"{DISK_SPEED / 1e9:g} GB/s, {COMPUTE_SPEED / 1e12:g} TFLOP/s, {HOST_UPDATE_SPEED / 1e9:g}e9 "
    "updates/s on the host"
)
_SPEEDS = {
    NETWORK: NETWORK_SPEED,
    IN: HOST_SPEED,
    OUT: HOST_SPEED,
    READ: DISK_SPEED,
    WRITTEN: DISK_SPEED,
}

# Bytes that each element of a tensor takes to its owner (gradient and master in fp32), and back
# (the new master).
_TO_OWNER, _BACK = 8, 4


class Work(NamedTuple):
    """Of one micro-batch: floating-point operations, and bytes of activations that are kept in host
    memory.
    """

    operations: int = 0
    saved: int = 0


@dataclass
class Traffic:
    """Bytes by link and cause; elements that the CPU updates; floating-point operations (0:
    unknown).
    """

    links: dict[str, Counter[str]] = field(
        default_factory=lambda: {link: Counter() for link in LINKS}
    )
    host_updates: float = 0.0
    operations: int = 0

    def add(self, link: str, cause: str, nbytes: float) -> None:
        if nbytes:
            self.links[link][cause] += round(nbytes)

    @property
    def seconds(self) -> float:
        """Of the step, if nothing overlaps."""
        links = sum(causes.total() / _SPEEDS[link] for link, causes in self.links.items())
        return links + self.host_updates / HOST_UPDATE_SPEED + self.operations / COMPUTE_SPEED


def traffic(
    model: nn.Module,
    groups: Sequence[Kept],
    gathers: Sequence[int],
    config: Config,
    world_size: int,
    work: Work,
) -> Traffic:
    """What a step moves. Args: gathers: how often each group is gathered in it."""
    micro_batches = config.gradient_accumulation_steps or 1
    found = Traffic(operations=work.operations * micro_batches)
    for group, times in zip(groups, gathers, strict=True):
        _gather(found, group, times, config, world_size)
        if group.trainable:
            _reduce(found, group, config, world_size)
            _refresh(found, group, config)
    whole = updates_whole_tensors(config)
    for group in groups:
        if group.offloaded:
            _take_gradients_out(found, group, config)
            _update_offloaded(found, group, whole)
        if group.trainable:
            _write_weights(found, group, config, whole)
    if whole and config.zero_optimization.stage:
        found.add(
            NETWORK,
            "whole tensors to their owners and back",
            _exchanged(groups, param_groups(model, config)),
        )
    for link in (OUT, IN):
        found.add(link, "activations", work.saved * micro_batches)
    return found


# -- weights


def _gather(found: Traffic, group: Kept, times: int, config: Config, world_size: int) -> None:
    """All-gathers for forward and backward.

    With second shards only the first one after an update is among all.
    """
    zero, shard, cause = (
        config.zero_optimization,
        group.layout.shard_numel,
        "parameters for forward and backward",
    )
    second = zero.second_shards_over(world_size)
    if second and times:
        within = times - group.trainable
        found.add(
            NETWORK, cause, within * (second - 1) * (group.layout.padded // second) * _item(config)
        )
        times -= within
    coded = zero.zero_quantized_weights or (
        zero.zero_quantized_nontrainable_weights and not group.trainable
    )
    message = message_bytes(shard, 8) if coded else shard * _item(config)
    found.add(NETWORK, cause, times * (group.layout.world_size - 1) * message)
    if group.home.weights != DEVICE:
        found.add(IN, cause, times * shard * _item(config))
    if group.home.weights == DISK:
        found.add(READ, cause, times * shard * _item(config))


def _refresh(found: Traffic, group: Kept, config: Config) -> None:
    """After an update all ranks get the weights that they keep whole."""
    zero, nbytes = config.zero_optimization, group.layout.shard_numel * _item(config)
    if zero.stage == 3 and not group.plan.persistent:
        return
    if not group.layout.replicated:
        found.add(NETWORK, "updated parameters", (group.layout.world_size - 1) * nbytes)
    if zero.offloads_params:  # the shard of a persistent group is in host memory
        found.add(IN, "updated parameters", nbytes)


def _write_weights(found: Traffic, group: Kept, config: Config, whole: bool) -> None:
    """Updated weights go from where they were computed to where the shard is."""
    cause, home = "updated parameters", group.home.weights
    if config.zero_optimization.offloads_params and group.plan.persistent:
        home = HOST
    nbytes = group.layout.shard_numel * _item(config)
    on_host = group.offloaded and not whole
    if home == DEVICE:
        found.add(IN, cause, nbytes * on_host)
        return
    if group.shares_weights:
        return  # written as a master
    found.add(OUT, cause, nbytes * (not on_host))
    if home == DISK:
        found.add(WRITTEN, cause, nbytes)


def _item(config: Config) -> int:
    return config.compute_dtype.itemsize


# -- gradients


def _reductions(config: Config) -> int:
    """How often a group's gradients are reduced in a step: stages 0 and 1 sum those of
    micro-batches first.
    """
    return (config.gradient_accumulation_steps or 1) if config.zero_optimization.stage >= 2 else 1


def _reduce(found: Traffic, group: Kept, config: Config, world_size: int) -> None:
    layout, ranks, times = group.layout, group.layout.world_size, _reductions(config)
    zero, replicas, shard = config.zero_optimization, world_size // ranks, layout.padded // ranks
    sums = zero.stage < 2 and (config.gradient_accumulation_steps or 1) > 1
    sent = (
        config.communication_data_type or (config.sum_dtype if sums else config.compute_dtype)
    ).itemsize
    message = shard * sent
    if zero.zero_quantized_gradients and ranks > 1:
        message = coded_gradients(shard, ranks, config)
    found.add(NETWORK, "gradients", times * (ranks - 1) * message)
    found.add(NETWORK, "gradients", times * 2 * (replicas - 1) * shard * sent / replicas)
    if layout.replicated:
        found.add(NETWORK, "gradients", times * (ranks - 1) * group.gradient / ranks)


# -- the optimizer's part in host memory or in files


def _take_gradients_out(found: Traffic, group: Kept, config: Config) -> None:
    """Each reduction's result leaves the device, and comes back for the next micro-batch's to be
    added.
    """
    nbytes, times = group.gradient, _reductions(config)
    for link, moves in ((OUT, times), (IN, times - 1)):
        found.add(link, "gradients", moves * nbytes)
    if group.place(nbytes) == DISK:
        found.add(WRITTEN, "gradients", times * nbytes)
        found.add(READ, "gradients", (times - 1) * nbytes)


def _update_offloaded(found: Traffic, group: Kept, whole: bool) -> None:
    """The update of one group: by the CPU, or if it takes whole tensors by the device."""
    cause, in_file = "masters and optimizer state", group.place(group.master) == DISK
    found.host_updates += 0 if whole else group.layout.shard_numel
    nbytes = group.state * in_file
    if in_file and not (group.shares_weights and group.home.weights == HOST):
        nbytes += group.master
    for link in (READ, WRITTEN):
        found.add(link, cause, nbytes)
    if group.place(group.gradient) == DISK:
        found.add(READ, "gradients", group.gradient)
    if whole:
        found.add(IN, "gradients", group.gradient)
        for link in (IN, OUT):
            found.add(link, cause, group.master + group.state)


# -- optimizers of whole tensors


def _exchanged(groups: Sequence[Kept], group_of: Mapping[nn.Parameter, int]) -> int:
    """Bytes that the rank sends that sends most: parts of tensors to their owners, and updated
    parts back.
    """
    sent = Counter[int]()
    for tensor in whole_tensors(groups, group_of):
        for rank, numel in enumerate(tensor.held):
            if numel and rank != tensor.owner:
                sent[rank] += _TO_OWNER * numel
                sent[tensor.owner] += _BACK * numel
    return max(sent.values(), default=0)
