"""What a training needs of one machine, and whether it is there.

This file knows nothing of other ranks.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from zero.comm.world import compute_device, default_backend
from zero.device import CPU, accelerator, is_accelerator, room
from zero.errors import UsageError
from zero.offload.nvme import ScratchFile
from zero.optim import adam_cpu

OK, SLOW, FAILS = "ok", "slow", "FAILS"
# The oldest versions that the package accepts.
LEAST = {"torch": "2.11", "transformers": "5.17", "accelerate": "1.15"}
# Docker gives a container 64 MB of shared memory. NCCL and a DataLoader's workers need more.
LEAST_SHARED_MEMORY = 1 << 30
LEAST_MEMORY = 2 << 30
# Bytes that are written to the folder and read back.
FILE_BYTES = 256 << 20
# Slower than this, a disk is slower than any NVMe drive.
SLOW_DISK = 500e6


class Finding(NamedTuple):
    """One line. level:

    `OK`; `SLOW`, where training works but not well; `FAILS`, where something would not work.
    """

    check: str
    level: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<6}{self.check:<16}{self.found}" + (
            f" -> {self.remedy}" if self.remedy else ""
        )


def findings(folder: Path | None) -> Iterator[Finding]:
    """Check this machine, and the disk of `folder` if there is one.

    Raises UsageError for a folder that is missing.
    """
    if folder is not None and not folder.is_dir():
        raise UsageError(f"doctor: --folder {folder}: this is no folder")
    yield _python()
    yield from (_version(package) for package in LEAST)
    yield _device()
    yield _backend()
    yield _bf16()
    yield _locked_memory()
    yield _shared_memory(Path("/dev/shm"))
    yield _memory()
    yield _compiler()
    yield _host_name()
    if folder is not None:
        yield _disk(folder)


def _python() -> Finding:
    found = platform.python_version()
    if TorchVersion(found) < "3.10":
        return Finding("python", FAILS, found, "use Python 3.10 to 3.13")
    return Finding("python", OK, found)


def _version(package: str) -> Finding:
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = ""
    least = LEAST[package]
    if not found or TorchVersion(found) < least:
        return Finding(package, FAILS, found or "missing", f"pip install '{package}>={least}'")
    return Finding(package, OK, found)


def _device() -> Finding:
    device = accelerator()
    if device is None:
        if shutil.which("nvidia-smi") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            remedy = (
                "there is a driver: install a CUDA build of torch, or a driver for CUDA "
                f"{torch.version.cuda}"
            )
            return Finding("devices", FAILS, "torch sees no GPU", remedy)
        return Finding("devices", OK, f"none: training runs on {os.cpu_count()} CPU cores")
    number = torch.accelerator.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    memory = torch.accelerator.get_memory_info(device)[1] / 2**30
    name = getattr(torch.get_device_module(device), "get_device_name", lambda *_: device.type)(
        device
    )
    found = f"{number} x {name}, {memory:.0f} GiB"
    if ranks > number:
        return Finding(
            "devices",
            FAILS,
            f"{found} for {ranks} ranks",
            f"start at most {number} ranks on this machine",
        )
    return Finding("devices", OK, found)


def _backend() -> Finding:
    device = compute_device()
    name = default_backend(device)
    if accelerator() is not None and not is_accelerator(device):
        return Finding(
            "backend",
            SLOW,
            "torch has no collectives for this device",
            "the engine computes on the CPU",
        )
    if not dist.is_backend_available(name):
        return Finding(
            "backend", FAILS, f"this torch was built without {name}", "install a build that has it"
        )
    return Finding("backend", OK, name)


def _bf16() -> Finding:
    if accelerator() is not None:
        has = getattr(torch.get_device_module(), "is_bf16_supported", lambda: True)()
    else:
        cpu = Path("/proc/cpuinfo")
        text = cpu.read_text() if cpu.exists() else ""
        has = platform.machine() != "x86_64" or "avx512_bf16" in text or "amx_bf16" in text
    return (
        Finding("bf16", OK, "in hardware")
        if has
        else Finding("bf16", SLOW, "emulated", "train in fp32 or fp16")
    )


def _locked_memory() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    if accelerator() is None:
        return Finding("locked memory", OK, f"{found}; not needed without an accelerator")
    try:
        torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        remedy = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        return Finding(
            "locked memory", SLOW, f"{found}; 64 MiB: {str(error).splitlines()[0]}", remedy
        )
    return Finding("locked memory", OK, f"{found}; 64 MiB can be pinned")


def _shared_memory(place: Path) -> Finding:
    if not place.is_dir():
        return Finding(
            "shared memory", SLOW, f"no {place}", "DataLoader workers need it: mount a tmpfs there"
        )
    size = shutil.disk_usage(place)
    found = f"{size.free / 2**30:.1f} of {size.total / 2**30:.1f} GiB free in {place}"
    if size.free < LEAST_SHARED_MEMORY:
        level = (
            SLOW if accelerator() is None else FAILS
        )  # NCCL needs it; on CPUs only a DataLoader's workers do
        return Finding(
            "shared memory", level, found, "docker run --shm-size=8g, or delete what lies there"
        )
    return Finding("shared memory", OK, found)


def _memory() -> Finding:
    free, total = room(CPU)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free" + (
        f" for each of {ranks} ranks" if ranks > 1 else ""
    )
    if free < LEAST_MEMORY:
        return Finding(
            "host memory", SLOW, found, "end other processes, start fewer ranks, or raise the limit"
        )
    return Finding("host memory", OK, found)


def _compiler() -> Finding:
    name = os.environ.get("CXX") or "c++"
    if adam_cpu.is_compiled():
        return Finding("C++ compiler", OK, f"{name} has built the Adam kernel")
    remedy = "only for offloaded optimizers: install a C++ compiler, or name one in CXX"
    return Finding("C++ compiler", SLOW, f"{name} cannot build the Adam kernel", remedy)


def _host_name() -> Finding:
    """gloo and NCCL's start-up connect to the address of the host's name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        remedy = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Finding("host name", SLOW, f"{name} has no address", remedy)
    return Finding("host name", OK, f"{name} is {address}")


def _disk(folder: Path) -> Finding:
    """Write and read as the engine does: past the page cache, in requests of several threads."""
    free = shutil.disk_usage(folder).free
    if free < 2 * FILE_BYTES:
        return Finding(
            "disk", FAILS, f"{free >> 20} MiB free in {folder}", "name a folder on another disk"
        )
    file = ScratchFile(folder)
    host = torch.ones(FILE_BYTES, dtype=torch.uint8, device="cpu")
    try:
        place = file.empty(FILE_BYTES, torch.uint8)
        rates = []
        for move in (lambda: file.write(place, host), lambda: file.read(place, host)):
            start = time.perf_counter()
            move().wait()
            rates.append(FILE_BYTES / (time.perf_counter() - start))
    except OSError as error:
        return Finding("disk", FAILS, str(error), "name a folder on another disk")
    finally:
        file.close()
    found = f"writes {rates[0] / 1e9:.2f} GB/s, reads {rates[1] / 1e9:.2f} GB/s in {folder}"
    if min(rates) < SLOW_DISK:
        return Finding("disk", SLOW, found, "for offload to files name a folder on an NVMe drive")
    return Finding("disk", OK, found)
