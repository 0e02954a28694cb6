"""Speeds of a machine, on which the seconds of an estimate rest: those that `zero doctor --speeds`
has measured, or those of a common device by its maker.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from zero.errors import UsageError

# What a training reaches of the figures of makers: of matrix products as H100s run them
# (docs/results.md), of memory, of PCIe, and of an NVMe drive that writes for a long time.
REACHED_COMPUTE, REACHED_MEMORY, REACHED_PCIE, REACHED_DISK = 0.5, 0.8, 0.8, 0.7


@dataclass(frozen=True)
class Speeds:
    """What one rank has of its machine: TFLOP/s of matrix products, GB/s of all else.

    The defaults are those of an H100 with the host around it and a PCIe 4 drive.

    Attributes:
        compute: of 16-bit matrix products on the device.
        compute_fp32: of those in fp32, without TF32.
        device_memory: of the memory of the device, which all other operations read and write.
        network: sent to other ranks.
        to_device: of copies from host memory. `from_device`: of copies back.
        disk_read: of the rank's file. `disk_written`: likewise.
        memory: at which updates by the CPU read and write states; what sixteen cores of a server
            with DDR5 reach.
        memory_8_bit: the same where moments have 8 bits, which are decoded and coded.
        has_accelerator: whether the device is not the host itself.
        source: where the speeds come from, in words.
    """

    compute: float = 495.0
    compute_fp32: float = 33.0
    device_memory: float = 2680.0
    network: float = 25.0
    to_device: float = 50.0
    from_device: float = 50.0
    disk_read: float = 4.9
    disk_written: float = 3.5
    memory: float = 200.0
    memory_8_bit: float = 70.0
    has_accelerator: bool = True
    source: str = "assumed, an H100"

    def __str__(self) -> str:
        links = [
            f"{field.name.replace('_', ' ')} {getattr(self, field.name):.3g}"
            for field in fields(self)
            if field.type == "float" and not field.name.startswith("compute")
        ]
        compute = f"compute {self.compute:.3g} ({self.compute_fp32:.3g} in fp32) TFLOP/s"
        return f"speeds ({self.source}): {compute}; in GB/s: {', '.join(links)}"


# By the makers: TFLOP/s of dense 16-bit matrix products with sums in fp32, and of fp32; GB/s of the
# device's memory, and of PCIe, one direction. NVIDIA: whitepapers of GA102 (2.1), Ada (1.1) and RTX
# Blackwell (1.1); data sheets of A100 80GB SXM, H100 SXM, H200 SXM, and HGX B200.
_GPUS = {
    "rtx3090": (71, 35.6, 936, "pcie4"),
    "rtx4090": (165.2, 82.6, 1008, "pcie4"),
    "rtx5090": (209.5, 104.8, 1792, "pcie5"),
    "a100": (312, 19.5, 2039, "pcie4"),
    "h100": (989, 67, 3350, "pcie5"),
    "h200": (989, 67, 4800, "pcie5"),
    "b200": (2250, 75, 8000, "pcie5"),
}
# Sixteen lanes, 128b/130b: PCI-SIG, "PCI Express Base Specification" 3.0, 4.0, 5.0.
_PCIE = {"pcie3": 15.75, "pcie4": 31.5, "pcie5": 63.0}
# Sequential reads and writes: Samsung's data sheets of 970 EVO Plus and 980 PRO, Crucial's of T705.
_NVME = {"nvme3": (3.5, 3.3), "nvme4": (7.0, 5.0), "nvme5": (14.5, 12.7)}
DEVICES = (*_GPUS, *_PCIE, *_NVME)


def of_device(names: str) -> Speeds:
    """The speeds of a GPU, PCIe and drive, named with commas between them: "rtx4090,pcie3,nvme4".

    What is not named is as with the GPU's own PCIe, or as assumed. UsageError for unknown names.
    """
    known = [re.sub(r"[ _-]", "", name).lower() for name in names.split(",") if name]
    if unknown := [name for name in known if name not in DEVICES]:
        raise UsageError(f"--device {unknown[0]}: expected some of {', '.join(DEVICES)}")
    if not known:
        return Speeds()
    speeds = Speeds(source=f"by the makers of {', '.join(known)}; others assumed")
    for name in sorted(known, key=DEVICES.index):  # a PCIe that is named replaces the GPU's
        if name in _GPUS:
            compute, compute_fp32, memory, pcie = _GPUS[name]
            speeds = replace(
                speeds,
                compute=REACHED_COMPUTE * compute,
                compute_fp32=REACHED_COMPUTE * compute_fp32,
                device_memory=REACHED_MEMORY * memory,
            )
            name = pcie
        if name in _PCIE:
            copies = REACHED_PCIE * _PCIE[name]
            speeds = replace(speeds, to_device=copies, from_device=copies)
        if name in _NVME:
            read, written = (REACHED_DISK * speed for speed in _NVME[name])
            speeds = replace(speeds, disk_read=read, disk_written=written)
    return speeds


def default_file() -> Path:
    """Where `zero doctor --speeds` writes, and `zero estimate` looks: speeds.json in
    ~/.cache/zero (XDG_CACHE_HOME).
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zero/speeds.json"


def read(file: Path) -> Speeds:
    """The speeds of a file by `zero doctor --speeds`; what it lacks is assumed.

    UsageError if it is no such file.
    """
    try:
        given = json.loads(file.read_text(encoding="utf-8"))["speeds"]
        speeds = replace(Speeds(), **given)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--speeds {file}: cannot be read ({error}); zero doctor --speeds {file} writes it"
        ) from error
    for field in fields(speeds):
        speed = getattr(speeds, field.name)
        if field.type == "float" and not (isinstance(speed, (int, float)) and 0 < speed < math.inf):
            raise UsageError(
                f"--speeds {file}: {field.name} is {speed!r}, expected a number above 0"
            )
    return speeds


# What single options set, both ways of a link at once.
GIVEN = {
    "network": ("network",),
    "host": ("to_device", "from_device"),
    "disk": ("disk_read", "disk_written"),
    "memory": ("memory",),
    "compute": ("compute", "compute_fp32"),
}


def chosen(file: Path | None, device: str | None, given: Mapping[str, float | None]) -> Speeds:
    """The speeds of this file, else of this device, else of the default file, else assumed; where
    one is `given` by its name in `GIVEN`, that one.
    """
    if file is None and device is None and default_file().is_file():
        file = default_file()
    speeds = of_device(device or "") if file is None else read(file)
    for name, speed in given.items():
        if speed is not None:
            speeds = replace(speeds, **dict.fromkeys(GIVEN[name], speed))
    return replace(speeds, memory_8_bit=min(speeds.memory_8_bit, speeds.memory))
