"""The checks of one machine: is everything there that training needs?

This file knows nothing about other ranks.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from zero.comm.world import compute_device, default_backend
from zero.device import CPU, accelerator, is_accelerator, room
from zero.optim import adam_cpu
from zero.releases import installed, newer_than_tested
from zero.tools.doctor.speeds import FILE_BYTES, file_speeds

OK, SLOW, FAILS = "ok", "slow", "FAILS"
# The oldest versions that the package accepts.
LEAST = {"torch": "2.8", "transformers": "4.57.1", "accelerate": "1.7"}
# Docker gives a container 64 MB of shared memory. NCCL and a DataLoader's workers need more.
LEAST_SHARED_MEMORY = 1 << 30
LEAST_MEMORY = 2 << 30
# Slower than this, a disk is slower than any NVMe drive.
SLOW_DISK = 0.5  # GB/s


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        level: `OK`; `SLOW`, where training works but not well; `FAILS`, where something would not
            work.
    """

    check: str
    level: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.level:<6}{self.check:<16}{self.found}{remedy}"


@dataclass(eq=False)
class Fault(Exception):
    """What a check found. `remedy`: replaces the check's own remedy."""

    found: str
    level: str = FAILS
    remedy: str = ""


class Check(NamedTuple):
    """`look` returns what it found, or raises `Fault`."""

    name: str
    look: Callable[[], str]
    remedy: str = ""

    def finding(self) -> Finding:
        try:
            return Finding(self.name, OK, self.look())
        except Fault as fault:
            return Finding(self.name, fault.level, fault.found, fault.remedy or self.remedy)


def findings(folder: Path | None) -> Iterator[Finding]:
    """Check this machine, and the disk of `folder` if there is one."""
    checks = _checks()
    if folder is not None:
        checks.append(Check("disk", partial(_disk, folder), "name a folder on another disk"))
    return (check.finding() for check in checks)


def _checks() -> list[Check]:
    versions = [
        Check(package, partial(_version, package, least), f"pip install '{package}>={least}'")
        for package, least in LEAST.items()
    ]
    return [
        Check("python", platform.python_version),
        *versions,
        Check("newest tested", lambda: newer_than_tested() or "no library is newer"),
        Check("devices", _device),
        Check("backend", _backend, "install a build that has it"),
        Check("bf16", _bf16, "train in fp32 or fp16"),
        Check("locked memory", _locked, "ulimit -l unlimited, or docker run --ulimit memlock=-1"),
        Check(
            "shared memory",
            partial(_shared_memory, Path("/dev/shm")),
            "docker run --shm-size=8g, or delete files there",
        ),
        Check("host memory", _memory, "end other processes, start fewer ranks, or raise the limit"),
        Check(
            "C++ compiler",
            _compiler,
            "only for offloaded optimizers: install a C++ compiler, or name one in CXX",
        ),
        Check("host name", _host_name, "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"),
    ]


def _version(package: str, least: str) -> str:
    found = installed(package)
    if not found:
        raise Fault("missing")
    if TorchVersion(found) < least:
        raise Fault(found)
    return found


def _device() -> str:
    device = accelerator()
    if device is None:
        if shutil.which("nvidia-smi") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            build = f"install a CUDA build of torch, or a driver for CUDA {torch.version.cuda}"
            raise Fault("torch sees no GPU", remedy=f"there is a driver: {build}")
        return f"none: training runs on {device_name(CPU)}"
    number = torch.accelerator.device_count()
    memory = torch.accelerator.get_memory_info(device)[1] / 2**30
    found = f"{number} x {device_name(device)}, {memory:.0f} GiB"
    if _ranks() > number:
        remedy = f"start at most {number} ranks on this machine"
        raise Fault(f"{found} for {_ranks()} ranks", remedy=remedy)
    return found


def device_name(device: torch.device) -> str:
    """The accelerator's name, or how many cores there are."""
    if not is_accelerator(device):
        return f"{os.cpu_count()} CPU cores"
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type


def _ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _backend() -> str:
    device = compute_device()
    name = default_backend(device)
    if accelerator() is not None and not is_accelerator(device):
        found = "torch has no collectives for this device"
        raise Fault(found, SLOW, "the engine computes on the CPU")
    if not dist.is_backend_available(name):
        raise Fault(f"this torch was built without {name}")
    return name


def _bf16() -> str:
    if accelerator() is not None:
        has = getattr(torch.get_device_module(), "is_bf16_supported", lambda: True)()
    else:
        cpu = Path("/proc/cpuinfo")
        text = cpu.read_text() if cpu.exists() else ""
        has = platform.machine() != "x86_64" or "avx512_bf16" in text or "amx_bf16" in text
    if not has:
        raise Fault("emulated", SLOW)
    return "in hardware"


def _locked() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    if accelerator() is None:
        return f"{found}; not needed without an accelerator"
    try:
        torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise Fault(f"{found}; 64 MiB: {str(error).splitlines()[0]}", SLOW) from None
    return f"{found}; 64 MiB can be pinned"


def _shared_memory(place: Path) -> str:
    if not place.is_dir():
        raise Fault(f"no {place}", SLOW, "DataLoader workers need it: mount a tmpfs there")
    size = shutil.disk_usage(place)
    found = f"{size.free / 2**30:.1f} of {size.total / 2**30:.1f} GiB free in {place}"
    if size.free < LEAST_SHARED_MEMORY:
        # NCCL needs it; on CPUs only a DataLoader's workers do
        raise Fault(found, SLOW if accelerator() is None else FAILS)
    return found


def _memory() -> str:
    free, total = room(CPU)
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if _ranks() > 1:
        found += f" for each of {_ranks()} ranks"
    if free < LEAST_MEMORY:
        raise Fault(found, SLOW)
    return found


def _compiler() -> str:
    name = os.environ.get("CXX") or "c++"
    if not adam_cpu.is_compiled():
        raise Fault(f"{name} cannot build the Adam kernel", SLOW)
    return f"{name} has built the Adam kernel"


def _host_name() -> str:
    """gloo and NCCL's start-up connect to the address of the host's name."""
    name = socket.gethostname()
    try:
        return f"{name} is {socket.gethostbyname(name)}"
    except OSError:
        raise Fault(f"{name} has no address", SLOW) from None


def _disk(folder: Path) -> str:
    """Write and read as the engine does: past the page cache, in requests of several threads."""
    free = shutil.disk_usage(folder).free
    if free < 2 * FILE_BYTES:
        raise Fault(f"{free >> 20} MiB free in {folder}")
    try:
        rates = dict(file_speeds(folder, limit=0))
    except OSError as error:
        raise Fault(str(error)) from None
    written, read = rates["disk_written"], rates["disk_read"]
    found = f"writes {written:.2f} GB/s, reads {read:.2f} GB/s in {folder}"
    if min(written, read) < SLOW_DISK:
        raise Fault(found, SLOW, "for offload to files name a folder on an NVMe drive")
    return found
