"""A simulated accelerator: the device "sim" for torch on a machine that has none, and its collectives, "simccl".

Its memory is the host's, behind torch's PrivateUse1 interface, and every operator is the CPU's kernel on that memory.
It behaves as badly as a real device may, and says who relies on more:

late        Copies on side streams, copies from and to pinned memory, and collectives run when somebody waits for them,
            not before. Pinned memory holds NaN until a copy to it has run. (With several ranks late work also runs
            when nothing has moved for a while: a device goes on while the host waits for other ranks' hosts.)
freed       Freed memory holds NaN at once, unless work that may still use it was announced by `record_stream`.
ordered     Vector clocks check every use of memory. Two streams that use the same bytes, one of them writing, must be
            ordered by an event or by the host. New memory counts as used by the stream that allocates it, as a caching
            allocator hands it on within a stream.
pinned      Pinned memory that a copy reads must stay as it is until the host knows that the copy is done; registered
            memory must not be given back before that. Memory of torch's own pinned allocator may die at any time.

matched     Collectives of a communicator match by their order alone. Ranks with other orders get each other's data; if
            kinds or sizes differ as well, NaN. All communicators of a process run one after another: ranks that start
            them in different orders block each other. Sums are made in the dtype of the tensors.
two         There are two devices, each with memory, a limit, statistics and streams of its own.

`mistakes()` returns what was found. `set_limit` and `fail_collective` plan a lack of memory, and a failure. Not
modelled: kernels run when they are launched, though events say that they have not; so a device that is blocked blocks
the host at the next kernel. All threads of the host count as one. Nothing takes time.

`register()` makes the device known, for the rest of the process. This module is `torch.sim` then.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import include_paths, library_paths

NAME, BACKEND = "sim", "simccl"
SOURCE = Path(__file__).with_name("simulated.cpp")
_HEADERS = Path(sysconfig.get_path("include"))


def why_not() -> str:
    """Why the device cannot be built here; empty if it can."""
    if compiler() is None:
        return "the simulated accelerator needs a C++ compiler"
    if not (_HEADERS / "Python.h").exists():
        return f"the simulated accelerator needs Python's headers, and {_HEADERS} has no Python.h"
    return ""


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def build() -> Path:
    """The compiled device, which is kept in the system's temporary folder for this source and this torch."""
    command = [compiler(), "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{_HEADERS}"]
    command += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    sources = [path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]*"))]
    key = hashlib.sha256(repr((command, torch.__version__, sources)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"zero-simulated-accelerator-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    library = folder / f"{key}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes one compiles
        if not library.exists():
            fresh = library.with_suffix(".new")
            subprocess.run([*command, str(SOURCE), "-o", str(fresh), *libraries], check=True)
            fresh.rename(library)
    return library


@functools.cache
def _simulated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulated", build())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def register() -> None:
    """Make "sim" this process's accelerator, and "simccl" its backend for collectives."""
    torch.utils.rename_privateuse1_backend(NAME)
    _simulated()
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.empty(1, pin_memory=True)  # torch finds no pinned memory before it has once made some
    dist.Backend.register_backend(BACKEND, _collectives, devices=[NAME])


def _collectives(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Backend:
    if world_size > 1:
        _go_on()
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, timeout)
    return _simulated().collectives(gloo, int(timeout.total_seconds() * 1000))


@functools.cache
def _go_on() -> None:
    def forever() -> None:
        while True:
            time.sleep(0.1)
            _simulated().go_on_if_idle()

    threading.Thread(target=forever, name="simulated accelerator", daemon=True).start()


def mistakes() -> list[str]:
    """What was found since the last call."""
    return _simulated().mistakes()


def pending() -> int:
    """How many copies and collectives have not run yet."""
    return _simulated().pending()


def set_limit(nbytes: int) -> None:
    """Of the memory of each device."""
    _simulated().set_limit(nbytes)


def fail_collective(after: int) -> None:
    """Let this rank's next collective but `after` raise an error."""
    _simulated().fail_collective(after)


# -- what a device's module has


def is_available() -> bool:
    return True


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def get_rng_state(device: object = None) -> torch.Tensor:
    """Its generator is the CPU's."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


def manual_seed_all(seed: int) -> None:
    """Nothing: torch seeds the CPU's generator itself."""


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def cudart() -> SimpleNamespace:
    """The calls that pin memory, by the names that they have on CUDA and on ROCm."""
    return SimpleNamespace(cudaHostRegister=_register_memory, cudaHostUnregister=_simulated().unregister_memory)


def _register_memory(address: int, nbytes: int, flags: int) -> int:
    _simulated().register_memory(address, nbytes)
    return 0
