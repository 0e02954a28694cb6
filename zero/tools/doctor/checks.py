"""The checks of one machine: is everything there that training needs?

This file knows nothing about other ranks.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from zero.comm.world import compute_device, default_backend
from zero.device import CPU, accelerator, host_memory, is_accelerator
from zero.errors import rounded, size
from zero.optim import adam_cpu
from zero.releases import installed, newer_than_tested
from zero.tools.arguments import judged
from zero.tools.doctor.speeds import FILE_BYTES, file_speed

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
        line = f"{self.level:<6}{self.check:<16}{self.found}{remedy}"
        filled = textwrap.fill(line, 100, subsequent_indent=" " * 22, break_on_hyphens=False)
        verdict = {OK: True, FAILS: False}.get(self.level)
        return judged(self.level, verdict) + filled.removeprefix(self.level)


def _finding(check: str, works: bool, found: str, remedy: str, otherwise: str = FAILS) -> Finding:
    """What is fine needs no remedy."""
    return Finding(check, OK, found) if works else Finding(check, otherwise, found, remedy)


def findings(folder: Path | None) -> Iterator[Finding]:
    """Check this machine, and the disk of `folder`."""
    yield Finding("python", OK, platform.python_version())
    for package, least in LEAST.items():
        yield version(package, least)
    yield Finding("newest tested", OK, newer_than_tested() or "no library is newer")
    yield _devices()
    yield _backend()
    yield _bf16()
    yield _locked_memory()
    yield shared_memory(Path("/dev/shm"))
    yield _host_memory()
    yield compiler()
    yield _host_name()
    if folder is not None:
        yield disk(folder)


def version(package: str, least: str) -> Finding:
    found = installed(package)
    works = bool(found and TorchVersion(found) >= least)
    return _finding(package, works, found or "missing", f"pip install '{package}>={least}'")


def _devices() -> Finding:
    device = accelerator()
    if device is None:
        if shutil.which("nvidia-smi") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            build = f"install a CUDA build of torch, or a driver for CUDA {torch.version.cuda}"
            return Finding("devices", FAILS, "torch sees no GPU", f"there is a driver: {build}")
        return Finding("devices", OK, f"none: training runs on {device_name(CPU)}")
    count, ranks = torch.accelerator.device_count(), _ranks()
    memory = size(torch.accelerator.get_memory_info(device)[1])
    found = f"{count} x {device_name(device)}, {memory} for {ranks} rank(s)"
    return _finding(
        "devices", ranks <= count, found, f"start at most {count} ranks on this machine"
    )


def device_name(device: torch.device) -> str:
    """The accelerator's name, or how many cores there are."""
    if not is_accelerator(device):
        return f"{os.cpu_count()} CPU cores"
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type


def _ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _backend() -> Finding:
    device = compute_device()
    name = default_backend(device)
    if accelerator() is not None and not is_accelerator(device):
        found = "torch has no collectives for this device"
        return Finding("backend", SLOW, found, "the engine computes on the CPU")
    works = dist.is_backend_available(name)
    return _finding("backend", works, name, "install a build of torch that has it")


def _bf16() -> Finding:
    if accelerator() is not None:
        has = getattr(torch.get_device_module(), "is_bf16_supported", lambda: True)()
    else:
        cpu = Path("/proc/cpuinfo")
        text = cpu.read_text() if cpu.exists() else ""
        has = platform.machine() != "x86_64" or "avx512_bf16" in text or "amx_bf16" in text
    found = "in hardware" if has else "emulated"
    return _finding("bf16", has, found, "train in fp32 or fp16", SLOW)


def _locked_memory() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if limit == resource.RLIM_INFINITY else size(limit)
    if accelerator() is None:
        return Finding("locked memory", OK, f"{found}; not needed without an accelerator")
    try:
        torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        found = f"{found}; 64 MiB: {str(error).splitlines()[0]}"
        remedy = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        return Finding("locked memory", SLOW, found, remedy)
    return Finding("locked memory", OK, f"{found}; 64 MiB can be pinned")


def shared_memory(place: Path) -> Finding:
    if not place.is_dir():
        remedy = "DataLoader workers need it: mount a tmpfs there"
        return Finding("shared memory", SLOW, f"no {place}", remedy)
    usage = shutil.disk_usage(place)
    found = f"{size(usage.free)} of {size(usage.total)} free in {place}"
    # NCCL needs it; on CPUs only a DataLoader's workers do
    too_little = SLOW if accelerator() is None else FAILS
    remedy = "docker run --shm-size=8g, or delete files there"
    works = usage.free >= LEAST_SHARED_MEMORY
    return _finding("shared memory", works, found, remedy, too_little)


def _host_memory() -> Finding:
    free, total = host_memory()
    found = f"{size(free)} of {size(total)} free"
    if _ranks() > 1:
        found += f" for each of {_ranks()} ranks"
    remedy = "end other processes, start fewer ranks, or raise the limit"
    return _finding("host memory", free >= LEAST_MEMORY, found, remedy, SLOW)


def compiler() -> Finding:
    name, is_built = os.environ.get("CXX") or "c++", adam_cpu.is_compiled()
    found = f"{name} {'has built' if is_built else 'cannot build'} the Adam kernel"
    remedy = "only for offloaded optimizers: install a C++ compiler, or name one in CXX"
    return _finding("C++ compiler", is_built, found, remedy, SLOW)


def _host_name() -> Finding:
    """gloo and NCCL's start-up connect to the address of the host's name."""
    name = socket.gethostname()
    try:
        return Finding("host name", OK, f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        remedy = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Finding("host name", SLOW, f"{name} has no address", remedy)


def disk(folder: Path) -> Finding:
    free, remedy = shutil.disk_usage(folder).free, "name a folder on another disk"
    if free < 3 * FILE_BYTES:
        return Finding("disk", FAILS, f"{size(free)} free in {folder}", remedy)
    try:
        speed = file_speed(folder)
    except OSError as error:
        return Finding("disk", FAILS, str(error), remedy)
    found = f"reads and writes {rounded(speed)} GB/s in {folder}"
    remedy = "for offload to files name a folder on an NVMe drive"
    return _finding("disk", speed >= SLOW_DISK, found, remedy, SLOW)
