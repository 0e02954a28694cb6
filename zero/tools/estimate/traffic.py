"""What one rank moves in an optimizer step over each link, and the seconds that this takes on a
machine of given speeds.

[Note: traffic]
network
    bytes that the rank sends to others. Of a buffer that an all-gather fills, or that a
    reduce-scatter reads, a rank sends all but one N-th, N being the size of the group: this
    is what a ring sends, and what the engine sends on gloo. An all-reduce is both.
host to device, device to host
    copies between an accelerator and host memory. Without an accelerator there are none.
disk read, disk written
    bytes of the rank's own file.

A step includes all of its micro-batches. Only traffic that grows with the model is counted, not the
sum for the norm or messages by which ranks agree on an order. The numbers are the engine's own
counters (`zero/comm/traffic.py`)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from zero.comm.traffic import IN, LINKS, NETWORK, OUT, READ, WRITTEN
from zero.tools.estimate.speeds import Speeds

# The cause of traffic that belongs to the optimizer's update.
UPDATES = "masters and optimizer state"
# The cause of copies of activations, and the part of a step that these copies are.
ACTIVATIONS, BESIDE = "activations", "copies of activations"
# What is computed is counted like what is moved, as if this were a link. The "causes" are:
# OPERATIONS, floating-point operations of matrix products (FORWARD: of these, those of the first
# forward); FED, bytes that these products read and write; TOUCHED, bytes that all other operations
# of forward and backward read and write; CALLS, how many operations were started; ON_HOST and
# ON_DEVICE, bytes of memory that the optimizer's updates read and write there.
COMPUTE = "compute"
OPERATIONS, FORWARD, FED, TOUCHED, CALLS = "operations", "forward", "fed", "touched", "calls"
ON_HOST, ON_DEVICE = "updates on the host", "updates on the device"


@dataclass
class Traffic:
    """What a step moves and computes.

    Attributes:
        links: bytes by link and cause.
        computed: the numbers of `COMPUTE`.
        has_8_bit_moments: whether the CPU decodes and encodes moments.
        late: the fraction of updates by the CPU that may run during the next forward, 0 to 1.
        is_pipelined: whether files are read ahead, and written behind.
    """

    links: dict[str, Counter[str]] = field(
        default_factory=lambda: {link: Counter() for link in LINKS}
    )
    computed: Counter[str] = field(default_factory=Counter)
    has_8_bit_moments: bool = False
    late: float = 0.0
    is_pipelined: bool = False

    @classmethod
    def of(cls, micro_batches: Sequence[Counter[tuple[str, str]]], steps: int) -> Traffic:
        """Return the traffic of a step of `steps` micro-batches, of which the first, a middle one
        and the last were simulated.
        """
        found = cls()
        for number, each in enumerate(micro_batches):
            times = steps - 2 if number == 1 and steps > 2 else 1
            for (link, cause), count in each.items():
                if link == COMPUTE:
                    found.computed[cause] += times * count
                elif link in found.links and count:
                    found.links[link][cause] += times * count
        return found

    @property
    def operations(self) -> int:
        return self.computed[OPERATIONS]

    def widen(self, other: Traffic) -> None:
        """Take the larger values of `other`."""
        for link, causes in other.links.items():
            self.links[link] |= causes

    def seconds(self, speeds: Speeds, itemsize: int) -> float:
        """Return the seconds of the step. Only updates and files that may overlap do so.

        Args:
            itemsize: bytes of an element in the model's dtype.
        """
        parts = self.parts(speeds, itemsize)
        return sum(parts.values()) - self._hidden(parts, speeds)

    def parts(self, speeds: Speeds, itemsize: int) -> dict[str, float]:
        """Return the seconds of each part of the step, by its name."""
        rates = {NETWORK: speeds.network, READ: speeds.disk_read, WRITTEN: speeds.disk_written}
        if speeds.has_accelerator:
            rates |= {IN: speeds.to_device, OUT: speeds.from_device}
        moved: defaultdict[str, float] = defaultdict(float)
        for link, rate in rates.items():
            for cause, nbytes in self.links[link].items():
                in_update = link in (READ, WRITTEN) and cause == UPDATES
                beside = link in (IN, OUT) and cause == ACTIVATIONS
                name = "files of the update" if in_update else BESIDE if beside else link
                moved[name] += nbytes / rate / 1e9
        compute = speeds.compute if itemsize < 4 else speeds.compute_fp32
        memory = speeds.memory_8_bit if self.has_8_bit_moments else speeds.memory
        products = self.operations / compute / 1e12
        others = self.computed[TOUCHED] / speeds.device_memory / 1e9
        starts = self.computed[CALLS] / speeds.calls / 1e3
        if speeds.has_accelerator:  # which computes while the host starts the next operations
            starts = max(0.0, starts - products - others)
        else:  # an accelerator also reads the next blocks while it multiplies
            products += self.computed[FED] / speeds.device_memory / 1e9
        return {
            "matrix products": products,
            "other operations": others,
            "starting operations": starts,
            "update on the device": self.computed[ON_DEVICE] / speeds.device_memory / 1e9,
            "update on the host": self.computed[ON_HOST] / memory / 1e9,
            **moved,
        }

    def _hidden(self, parts: dict[str, float], speeds: Speeds) -> float:
        """Return the seconds that overlap with something else. Without an accelerator, forward and
        update share the cores. Activations are copied beside computation. Files that are read
        ahead, behind backward, and written during the next forward wait for nothing but the disk.
        """
        update, of_update = parts["update on the host"], parts.get("files of the update", 0.0)
        names = "matrix products", "other operations", "starting operations"
        compute = sum(parts[name] for name in names)
        forward = compute * self.computed[FORWARD] / max(1, self.operations)
        rest = update if speeds.has_accelerator else 0.0
        beside = min(parts.get(BESIDE, 0.0), compute)
        if not self.is_pipelined:
            return beside + min(forward, self.late * (rest + of_update))
        hidden = min(forward, self.late * rest)
        files = of_update + parts.get(READ, 0.0) + parts.get(WRITTEN, 0.0)
        others = sum(parts.values()) - files - hidden - beside
        least = self.late * min(files, others)
        return beside + hidden + max(min(update - hidden, of_update), least)
