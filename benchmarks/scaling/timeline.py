"""A model of a training step: what the engine waits for on N devices, for given links and sizes.

    python -m benchmarks.scaling.timeline llama-8b --ds-config configs/ds_config_zero3.json --ranks
    8 64 --batch 1 --seq 2048

`benchmarks/scaling/rehearsal.py` has the engine's own policies record the program of a step. This
file gives each operation its time on N devices. Every run prints its assumptions."""

from __future__ import annotations

import argparse
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.models import MODELS
from benchmarks.runner import Parser, Table, finish
from benchmarks.scaling.rehearsal import Op, RehearsedGroup, make_groups, rehearse_meta
from zero.build import overlaps_step
from zero.comm.quantized import message_bytes
from zero.config import Config, load_config
from zero.config.offload import OffloadOptimizerConfig
from zero.errors import UsageError
from zero.tools.arguments import above_zero, count
from zero.tools.estimate.machine import DEVICE, DISK, HOST
from zero.tools.estimate.model import fill_in, read_config
from zero.tools.estimate.speeds import DEVICES, Speeds, chosen

ASSUMPTIONS = """\
assumptions
- Every rank computes for the same time. The host is never late: launches and Python cost nothing.
- Compute time is counted floating-point operations over --flops (attention without a fused kernel,
  a causal mask saves nothing). Operations that read more than they compute, such as norms and the
  loss, are in --flops by guess only.
- A collective is a ring (--direct: one message to each other rank). It moves (N-1)/N of the full
  buffer over the slowest link, and pays the latency of each hop. All-gathers and reductions share
  the network, one after another.
- Groups are of consecutive ranks. The same collective of all groups of a node runs at the same
  time, and shares the links between nodes. Coded gradients are exchanged within nodes first, then
  between them, if all nodes are full.
- A collective, and a copy from the host, starts when compute has come to where the engine starts
  it.
- Copies to and from the device have a link each, the disk has one. Contention for host memory is
  in --host-adam only.
- Copies inside of the device (gradients to flat buffers, casts) take no time. An update on the
  device takes the time of its bytes over --device-memory-bandwidth.
- The step's norm is an all-reduce that costs latency alone. Late updates run in the order of the
  next forward."""


# Bytes of host memory that an update of one element by Adam reads and writes, in 16-bit training.
ADAM_BYTES = 28


@dataclass(frozen=True)
class Machine:
    """Speeds, each of one direction. The help of the command line says what each one is."""

    flops: float = field(
        default=Speeds.compute * 1e12,
        metadata={"help": "operations per second that a device reaches"},
    )
    within: float = field(default=300e9, metadata={"help": "bytes/s between the devices of a node"})
    between: float = field(
        default=8 * Speeds.network * 1e9,
        metadata={"help": "bytes/s between nodes, of all links of a node together"},
    )
    per_node: int = field(default=8, metadata={"help": "devices of a node"})
    latency_within: float = field(default=2e-6, metadata={"help": "seconds a hop within a node"})
    latency_between: float = field(default=8e-6, metadata={"help": "seconds a hop between nodes"})
    pcie: float = field(
        default=Speeds.to_device * 1e9,
        metadata={"help": "bytes/s between a device and host memory"},
    )
    disk: float = field(
        default=Speeds.disk_written * 1e9,
        metadata={"help": "bytes/s of a rank's share of the disk"},
    )
    host_adam: float = field(
        default=Speeds.memory * 1e9 / ADAM_BYTES,
        metadata={"help": "elements/s that a rank's share of the CPU updates"},
    )
    device_memory_bandwidth: float = field(
        default=Speeds.device_memory * 1e9, metadata={"help": "bytes/s of the device's memory"}
    )
    direct: bool = False

    @classmethod
    def of(cls, speeds: Speeds, itemsize: int) -> Machine:
        """With the speeds of `zero estimate`; what these lack is assumed. `itemsize`: of the
        model's dtype.
        """
        return cls(
            flops=(speeds.compute if itemsize < 4 else speeds.compute_fp32) * 1e12,
            between=8 * speeds.network * 1e9,
            pcie=min(speeds.to_device, speeds.from_device) * 1e9,
            disk=min(speeds.disk_read, speeds.disk_written) * 1e9,
            host_adam=speeds.memory * 1e9 / ADAM_BYTES,
            device_memory_bandwidth=speeds.device_memory * 1e9,
        )

    def collective(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-gather or reduce-scatter of groups of `ranks`, which are `stride`
        apart.

        Args: nbytes: of the full buffer of one group.
        """
        if ranks == 1:
            return 0.0
        if self.direct:
            return self.exchange(nbytes, ranks, stride)
        nodes, sharing = self._nodes(ranks, stride), min(stride, self.per_node)
        speed = self.within if nodes == 1 else min(self.within, self.between / sharing)
        latency = (nodes - 1) * self.latency_between + (ranks - nodes) * self.latency_within
        return nbytes * (ranks - 1) / ranks / speed + latency

    def exchange(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds in which each rank of such groups sends a message to each other one, `nbytes /
        ranks` long.
        """
        if ranks == 1:
            return 0.0
        nodes, of_node = self._nodes(ranks, stride), min(ranks * stride, self.per_node)
        here = math.ceil(of_node / stride)  # ranks of a group on a node
        inside = nbytes * (here - 1) / ranks / self.within
        outside = of_node * nbytes * (ranks - here) / ranks / self.between
        return max(inside, outside) + (self.latency_between if nodes > 1 else self.latency_within)

    def _nodes(self, ranks: int, stride: int) -> int:
        """The number of nodes on which a group lies."""
        return math.ceil(ranks / max(1, self.per_node // stride))


class Timeline:
    """Plays a program step after step, with `groups` of this number of ranks.

    Attributes, all in seconds: now: of the compute stream; waits: its waits, by cause; busy: by
    stream. A stream runs one operation after another. An operation starts when its stream is free
    and what it needs is there.

    Args: ranks: of the job. The groups' layouts say over how many of them a group is cut.
    """

    def __init__(
        self,
        groups: Sequence[RehearsedGroup],
        config: Config,
        machine: Machine,
        ranks: int,
        on_accelerator: bool = True,
    ):
        self.groups = groups
        self.config = config
        self.machine = machine
        self.ranks = ranks
        self.now = 0.0
        self.waits = Counter[str]()
        self.busy = Counter[str]()
        self._free = Counter[str]()
        self._gathers: dict[int, float] = {}
        self._late: dict[int, float] = {}  # when a group's late update ends
        self._in_flight: deque[tuple[RehearsedGroup, float]] = deque()
        self._offloading: deque[float] = deque()
        self._fresh: set[RehearsedGroup] = set()
        self._second: set[RehearsedGroup] = set()  # the groups that have a second shard (hpZ)
        self._item = config.compute_dtype.itemsize
        self._grad_item = config.sum_dtype.itemsize
        if (config.gradient_accumulation_steps or 1) == 1 and config.narrows_gradients:
            sent = config.communication_data_type or config.compute_dtype
            self._grad_item = min(self._grad_item, sent.itemsize)
        self._sent_item = (config.communication_data_type or config.compute_dtype).itemsize
        offload = config.zero_optimization.offload_optimizer or OffloadOptimizerConfig()
        self._updates_late = overlaps_step(
            offload, torch.device("cuda" if on_accelerator else "cpu")
        )

    def run(self, stream: str, seconds: float, after: float) -> float:
        """Give an operation to a stream; the time of its end."""
        self._free[stream] = max(self._free[stream], after) + seconds
        self.busy[stream] += seconds
        return self._free[stream]

    def wait(self, end: float, cause: str) -> None:
        self.waits[cause] += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def _all_gather(self, group: RehearsedGroup, after: float) -> float:
        """The end of an all-gather that may start at `after`.

        With hpZ only the first one since an update is wide.
        """
        zero, layout = self.config.zero_optimization, group.layout
        ranks, second = layout.world_size, zero.second_shards_over(self.ranks)
        is_coded = zero.zero_quantized_weights or (
            zero.zero_quantized_nontrainable_weights and not group.trainable
        )
        if second and group in self._second:  # these are sent as they are
            ranks, is_coded = second, False
        self._second.add(group)
        shard = layout.padded // ranks
        message = message_bytes(shard, 8) if is_coded else shard * self._item
        return self.run("network", self.machine.collective(ranks * message, ranks), after)

    def _reduction(self, group: RehearsedGroup) -> float:
        """The end of a reduction that starts now: over the shard group, then over the ranks with
        the same shard.
        """
        zero, layout, machine = self.config.zero_optimization, group.layout, self.machine
        ranks, shard = layout.world_size, layout.padded // layout.world_size
        seconds = machine.collective(layout.padded * self._sent_item, ranks)
        if zero.zero_quantized_gradients:
            nbytes = ranks * message_bytes(shard, zero.zero_quantized_gradient_bits)
            near = (
                machine.per_node if ranks % machine.per_node == 0 else ranks
            )  # else one exchange among all
            seconds = machine.exchange(nbytes, near) + machine.exchange(
                nbytes / near, ranks // near, stride=near
            )
        seconds += 2 * machine.collective(
            shard * self._sent_item, self.ranks // ranks, stride=ranks
        )
        return self.run("network", seconds, self.now)

    def _compute(self, seconds: float, stream: str = "compute") -> None:
        self.now += seconds
        self.busy[stream] += seconds

    def step(self, program: Sequence[Op]) -> None:
        act = {"gather": self._gather, "use": self._use, "reduce": self._reduce}
        for op in program:
            if op.kind == "compute":
                self._compute(op.cost / self.machine.flops)
            elif op.kind == "backward ends":
                self._drain()
            elif op.kind == "step":
                self._update([op.group for op in program if op.kind == "use"])
            else:
                act[op.kind](self.groups[op.group])

    # -- weights

    def _gather(self, group: RehearsedGroup) -> None:
        nbytes, ready = group.layout.shard_numel * self._item, self.now
        if group.number in self._late:
            self.wait(self._late.pop(group.number), "optimizer")
        if group.home.weights == DISK:  # the all-gather starts at the use
            self._gathers[group.number] = self.run("disk", nbytes / self.machine.disk, self.now)
            return
        ready = self.now
        if group.home.weights == HOST:
            ready = self.run("to device", nbytes / self.machine.pcie, ready)
        self._gathers[group.number] = self._all_gather(group, ready)

    def _use(self, group: RehearsedGroup) -> None:
        end = self._gathers.pop(group.number)
        if group.home.weights == DISK:
            self.wait(end, "file")
            end = self.run(
                "to device", group.layout.shard_numel * self._item / self.machine.pcie, self.now
            )
            end = self._all_gather(group, end)
        self.wait(end, "gather")

    # -- gradients

    def _reduce(self, group: RehearsedGroup) -> None:
        zero, numel = self.config.zero_optimization, group.layout.padded
        while (
            self._in_flight
            and sum(u.layout.padded for u, _ in self._in_flight) + numel > zero.reduce_bucket_size
        ):
            self._finish_oldest()
        if group in self._fresh and group.home.optimizer != DEVICE:
            self._drain()
            nbytes = group.layout.shard_numel * self._grad_item
            self.wait(self.run("to device", nbytes / self.machine.pcie, self.now), "gradients in")
        self._fresh.add(group)
        self._in_flight.append((group, self._reduction(group)))
        if not zero.overlap_comm:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        group, end = self._in_flight.popleft()
        self.wait(end, "reduce")
        if group.layout.replicated:  # the second half of an all-reduce
            seconds = self.machine.collective(
                group.layout.padded * self._grad_item, group.layout.world_size
            )
            self.wait(self.run("network", seconds, self.now), "reduce")
        if group.home.optimizer == DEVICE:
            return
        if len(self._offloading) == 2:
            self.wait(self._offloading.popleft(), "gradients out")
        nbytes = group.layout.shard_numel * self._grad_item
        end = self.run("from device", nbytes / self.machine.pcie, self.now)
        if group.home.optimizer == DISK:
            end = self.run("disk", nbytes / self.machine.disk, end)
        self._offloading.append(end)

    def _drain(self) -> None:
        while self._in_flight:
            self._finish_oldest()
        while self._offloading:
            self.wait(self._offloading.popleft(), "gradients out")

    # -- the optimizer

    def _update(self, order: Sequence[int]) -> None:
        """The step: the norm, the updates that cannot be late, persistent groups gathered again,
        late updates.
        """
        self._fresh.clear()
        self._second = {group for group in self._second if not group.trainable}
        collective = self.machine.collective
        self.wait(self.now + 2 * collective(0, self.ranks), "norm")
        trained = [group for group in self.groups if group.trainable]
        late = {
            group.number: group for group in trained if self._updates_late and not group.persistent
        }
        for end in self._updates([group for group in trained if group.number not in late]):
            self.wait(end, "update")
        for group in trained:
            if group.persistent and group.layout.shard_numel < group.layout.padded:
                seconds = collective(group.layout.padded * self._item, group.layout.world_size)
                self.wait(self.run("network", seconds, self.now), "gather")
        ordered = [late[number] for number in dict.fromkeys([*order, *late]) if number in late]
        self._late = dict(
            zip([group.number for group in ordered], self._updates(ordered), strict=True)
        )

    def _updates(self, groups: Sequence[RehearsedGroup]) -> list[float]:
        """When the update of each group ends, if they begin now, one after another."""
        offload, machine, read, ends = (
            self.config.zero_optimization.offload_optimizer,
            self.machine,
            {},
            [],
        )
        for position, group in enumerate(groups):
            for ahead in groups[position : position + 1 + bool(offload and offload.pipeline_read)]:
                if ahead.home.optimizer == DISK and ahead.number not in read:
                    nbytes = ahead.layout.shard_numel * (
                        self._grad_item + 12
                    )  # gradient, master, two moments
                    read[ahead.number] = self.run("disk", nbytes / machine.disk, self.now)
            shard = group.layout.shard_numel
            if (
                group.home.optimizer == DEVICE
            ):  # reads all four, writes master, moments and the rounded weights
                seconds = (
                    shard * (self._grad_item + 24 + self._item) / machine.device_memory_bandwidth
                )
                ends.append(self.run("update on the device", seconds, self.now))
                continue
            end = self.run(
                "update on the host", shard / machine.host_adam, read.get(group.number, self.now)
            )
            if group.home.weights == DEVICE:
                end = self.run("to device", shard * self._item / machine.pcie, end)
            if group.home.optimizer == DISK:
                in_file = 12 + self._item * (group.home.weights == DISK)
                end = self.run("disk", shard * in_file / machine.disk, end)
            ends.append(end)
        return ends


def predict(
    groups: Sequence[RehearsedGroup],
    program: Sequence[Op],
    config: Config,
    machine: Machine,
    ranks: int,
    **others: Any,
) -> dict[str, Any]:
    """Seconds of a step that follows others: "step", "waits" by cause, and "busy" by stream."""
    timeline = Timeline(groups, config, machine, ranks, **others)
    for _ in range(3):
        begin = timeline.now
        timeline.waits.clear()
        timeline.busy.clear()
        timeline.step(program)
    return {
        "step": timeline.now - begin,
        "waits": dict(timeline.waits),
        "busy": dict(timeline.busy),
    }


# -- the command


SHAPES = ["t5-3b", "t5-11b", "llama-8b", "llama-70b"]


def shape_of(name: str) -> transformers.PretrainedConfig:
    return MODELS[name]() if name in MODELS else read_config(name)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add options for the speeds of a `Machine`, and those of the batch."""
    parser.add_argument(
        "--speeds", type=Path, metavar="FILE", help="speeds by zero doctor --speeds"
    )
    parser.add_argument(
        "--device", metavar="NAMES", help=f"speeds by the makers: {', '.join(DEVICES)}"
    )
    for each in fields(Machine):
        if each.metadata:
            parser.add_argument(
                f"--{each.name.replace('_', '-')}",
                type=count if each.type == "int" else above_zero,
                metavar="X",
                help=f"{each.metadata['help']}; assumed: {each.default:g}",
            )
    parser.add_argument(
        "--direct",
        action="store_true",
        help="ranks send to each other directly, as on gloo: no ring",
    )
    parser.add_argument(
        "--batch", type=count, default=1, help="sequences of a micro-batch on a rank"
    )
    parser.add_argument("--seq", type=count, default=2048, help="tokens of a sequence")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")


def machine_of(args: argparse.Namespace, config: Config) -> Machine:
    """The machine of the chosen speeds, but for those that are given. UsageError for a file or a
    device that is not known.
    """
    speeds = chosen(args.speeds, args.device, {})
    given = {each.name: getattr(args, each.name) for each in fields(Machine)}
    changed = {name: value for name, value in given.items() if value is not None}
    return replace(Machine.of(speeds, config.compute_dtype.itemsize), **changed)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "model", help=f"a model's folder or config.json, or one of {', '.join(SHAPES)}"
    )
    parser.add_argument("--ds-config", required=True, help="a ds_config.json")
    parser.add_argument("--ranks", type=count, nargs="+", default=[8], help="numbers of devices")
    add_machine(parser)
    parser.add_output()
    args = parser.parse_args()
    try:
        shape = shape_of(args.model)
        config = fill_in(load_config(args.ds_config, allow_auto=True), shape)
        model, program = rehearse_meta(
            shape, config, args.batch, args.seq, not args.no_checkpointing
        )
        machine = machine_of(args, config)
    except UsageError as error:
        parser.error(str(error))
    found = {
        ranks: predict(make_groups(model, config, ranks), program, config, machine, ranks)
        for ranks in args.ranks
    }
    rows = []
    for ranks, times in found.items():
        rows.append([ranks, "step", "", times["step"]])
        for part in ("waits", "busy"):
            listed = sorted(times[part].items(), key=lambda each: -each[1])
            rows += [[ranks, part, name, seconds] for name, seconds in listed if seconds > 5e-4]
    print(ASSUMPTIONS)
    columns = ["ranks", "part", "of", "s"]
    finish(args, Table(f"{args.model}; machine: {machine}", columns, rows), found=found)


if __name__ == "__main__":
    main()
