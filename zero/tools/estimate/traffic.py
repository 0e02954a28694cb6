"""What one rank moves in an optimizer step over each link, and the seconds that this takes on links
of given speeds.

[Note: traffic]
network
    bytes that the rank sends to others. Of a buffer that an all-gather fills, or that a
    reduce-scatter reads, a rank sends all but one N-th, N being the ranks of the group: this is
    what a ring sends, and what the engine's messages on gloo have. An all-reduce is both.
host to device, device to host
    copies between an accelerator and host memory. On a machine without one there are none.
disk read, disk written
    bytes of the rank's own file.

A step has all of its micro-batches. Counted is what grows with the model: not the norm's sum, not
orders on which ranks agree. The numbers are the engine's own counters (`zero/comm/traffic.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from zero.comm.traffic import IN, LINKS, NETWORK, OUT, READ, WRITTEN

# Speeds that are assumed: a rank's share of each link in bytes/s, of one direction; operations/s of
# a device; elements/s that a rank's share of the CPU updates. `benchmarks/scaling/timeline.py`
# begins with the same.
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

    @classmethod
    def of(
        cls, micro_batches: Sequence[tuple[Counter[tuple[str, str]], int]], steps: int
    ) -> Traffic:
        """The traffic of a step of `steps` micro-batches, of which the first, a middle one and the
        last were followed.
        """
        found = cls()
        for number, (moved, operations) in enumerate(micro_batches):
            times = steps - 2 if number == 1 and steps > 2 else 1
            found.operations += times * operations
            for (link, cause), nbytes in moved.items():
                if link in found.links and nbytes:
                    found.links[link][cause] += times * nbytes
        return found

    def widen(self, other: Traffic) -> None:
        """Take what is more in `other`."""
        for link, causes in other.links.items():
            self.links[link] |= causes

    @property
    def seconds(self) -> float:
        """Of the step, if nothing overlaps."""
        links = sum(causes.total() / _SPEEDS[link] for link, causes in self.links.items())
        return links + self.host_updates / HOST_UPDATE_SPEED + self.operations / COMPUTE_SPEED
