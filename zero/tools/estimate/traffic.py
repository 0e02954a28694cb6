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
from dataclasses import asdict, dataclass, field

from zero.comm.traffic import LINKS, NETWORK, READ, WRITTEN


@dataclass(frozen=True)
class Speeds:
    """What one rank has of each link, in GB/s of one direction, and of its device's compute, in
    TFLOP/s. All of it is assumed unless the user gives it.

    Attributes:
        host: of copies between device and host memory.
        memory: of host memory, which the updates of an offloaded optimizer read and write; what
            sixteen cores of a server with DDR5 reach.
    """

    network: float = 25.0
    host: float = 20.0
    disk: float = 1.0
    memory: float = 200.0
    compute: float = 400.0

    def __str__(self) -> str:
        *links, compute = asdict(self).items()
        words = ", ".join(f"{name} {speed:g} GB/s" for name, speed in links)
        return f"assumed: nothing overlaps; {words}, {compute[0]} {compute[1]:g} TFLOP/s"


@dataclass
class Traffic:
    """Bytes by link and cause; bytes of host memory that updates by the CPU read and write;
    floating-point operations (0: unknown).
    """

    links: dict[str, Counter[str]] = field(
        default_factory=lambda: {link: Counter() for link in LINKS}
    )
    updated: int = 0
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

    def seconds(self, speeds: Speeds) -> float:
        """Of the step, if nothing overlaps."""
        of_link = {NETWORK: speeds.network, READ: speeds.disk, WRITTEN: speeds.disk}
        moved = self.updated / speeds.memory
        for link, causes in self.links.items():
            moved += causes.total() / of_link.get(link, speeds.host)
        return moved / 1e9 + self.operations / speeds.compute / 1e12
