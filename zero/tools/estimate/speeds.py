"""The speeds of a machine, from which an estimate's seconds are computed: those that
`zero doctor --speeds` has measured, or those that the maker of a common device states.
"""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from zero.errors import UsageError, rounded


@dataclass(frozen=True)
class Speeds:
    """The speeds that one rank has: TFLOP/s for matrix products, GB/s for everything else but
    `calls`.

    The defaults describe an H100 with its host and a PCIe 4 drive.

    Attributes:
        compute: 16-bit matrix products on the device.
        compute_fp32: matrix products in fp32, without TF32.
        device_memory: the device's memory, which all other operations read and write.
        network: messages to other ranks.
        to_device: copies from host memory. `from_device`: copies back.
        disk_read: reads of the rank's file, beside writes. `disk_written`: writes, beside reads.
        memory: the speed at which updates by the CPU read and write states. The default is what
            sixteen cores of a server with DDR5 reach.
        memory_8_bit: the same for 8-bit moments, which are decoded and encoded.
        calls: thousands of operations that the host starts in a second.
        has_accelerator: whether the device is something other than the host itself.
        source: where the speeds come from, in words.
    """

    compute: float = 650.0
    compute_fp32: float = 33.0
    device_memory: float = 2680.0
    network: float = 25.0
    to_device: float = 50.0
    from_device: float = 50.0
    disk_read: float = 4.9
    disk_written: float = 3.5
    memory: float = 200.0
    memory_8_bit: float = 70.0
    calls: float = 200.0
    has_accelerator: bool = True
    source: str = "assumed, an H100"

    def __str__(self) -> str:
        shown = [f"{name.replace('_', ' ')} {rounded(getattr(self, name))}" for name in _NUMBERS]
        products, links, calls = ", ".join(shown[:2]), ", ".join(shown[2:-1]), 1000 * self.calls
        text = f"{products} TFLOP/s; {links} GB/s; calls {rounded(calls)} a second"
        return textwrap.fill(f"Speeds ({self.source}): {text}", 100, subsequent_indent="  ")


_NUMBERS = [each.name for each in fields(Speeds) if each.type == "float"]


# The fractions of the makers' figures that training reaches: 0.66 for 16-bit matrix products, with
# which three measured steps of an H100 (docs/results.md) are predicted within 5%: 1B, on the device
# and offloaded, and 8B in slices; 0.5 for those in fp32, not measured; 0.7 for a drive that writes
# for a long time; 0.8 for memory and PCIe.
_REACHED = {"compute": 0.66, "compute_fp32": 0.5, "disk_read": 0.7, "disk_written": 0.7}
# In the file: dense 16-bit matrix products with sums in fp32. NVIDIA: whitepapers of GA102 (2.1),
# Ada (1.1) and RTX Blackwell (1.1); data sheets of A100 80GB SXM, H100 SXM, H200 SXM, and HGX B200.
# PCIe, sixteen lanes in one direction, 128b/130b: PCI-SIG, "PCI Express Base Specification" 3.0,
# 4.0, 5.0. Sequential reads and writes: Samsung's data sheets of 970 EVO Plus and 980 PRO,
# Crucial's of T705.
DEVICES: dict[str, dict[str, float]] = {
    device: {name: _REACHED.get(name, 0.8) * figure for name, figure in figures.items()}
    for device, figures in json.loads(
        Path(__file__).with_name("devices.json").read_text(encoding="utf-8")
    ).items()
}


def of_device(names: str) -> Speeds:
    """Return the speeds of a GPU, PCIe and drive, given as names separated by commas, such as
    "rtx4090,pcie3,nvme4".

    By default PCIe is the GPU's own, and other speeds are the assumed ones. Raises UsageError for
    unknown names.
    """
    known = [re.sub(r"[ _-]", "", name).lower() for name in names.split(",") if name]
    if unknown := [name for name in known if name not in DEVICES]:
        raise UsageError(f"--device {unknown[0]}: expected some of {', '.join(DEVICES)}")
    if not known:
        return Speeds()
    speeds = Speeds(source=f"by the makers of {', '.join(known)}; others assumed")
    for name in sorted(known, key=[*DEVICES].index):  # a named PCIe replaces the GPU's
        speeds = replace(speeds, **DEVICES[name])
    return speeds


def default_file() -> Path:
    """Return the file that `zero doctor --speeds` writes and `zero estimate` reads: speeds.json in
    ~/.cache/zero (XDG_CACHE_HOME).
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zero/speeds.json"


def read(file: Path) -> Speeds:
    """Read speeds from a file of `zero doctor --speeds`; missing ones get the assumed values.

    Raises UsageError if it is not such a file.
    """
    try:
        given = json.loads(file.read_text(encoding="utf-8"))["speeds"]
        speeds = replace(Speeds(), **given)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--speeds {file}: not a file of zero doctor --speeds, which writes a new one "
            f"({type(error).__name__}: {error})"
        ) from error
    for name in _NUMBERS:
        speed = getattr(speeds, name)
        if not (isinstance(speed, (int, float)) and 0 < speed < math.inf):
            raise UsageError(f"--speeds {file}: {name} is {speed!r}, expected a number above 0")
    return speeds


# The speeds that each option sets; for a link, both directions at once.
GIVEN = {
    "network": ("network",),
    "host": ("to_device", "from_device"),
    "disk": ("disk_read", "disk_written"),
    "memory": ("memory",),
    "compute": ("compute", "compute_fp32"),
}


def chosen(file: Path | None, device: str | None, given: Mapping[str, float | None]) -> Speeds:
    """Return the speeds of this file, or else of this device, of the default file, or the assumed
    ones. Speeds that are `given` under their names in `GIVEN` replace them.
    """
    if file is None and device is None and default_file().is_file():
        file = default_file()
    speeds = of_device(device or "") if file is None else read(file)
    for name, speed in given.items():
        if speed is not None:
            speeds = replace(speeds, **dict.fromkeys(GIVEN[name], speed))
    return replace(speeds, memory_8_bit=min(speeds.memory_8_bit, speeds.memory))
