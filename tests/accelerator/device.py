"""A simulated accelerator for tests: torch's device "sim", and "simccl", the backend for its
collectives.

Its memory is host memory, behind torch's PrivateUse1 interface. Each operator runs the CPU's
kernel. The device behaves as badly as a real one may, and records every mistake of a program that
expects more:

late        Copies on side streams, copies from and to pinned memory, and collectives run only when
            somebody waits for them. Pinned memory holds NaN until the copy to it has run. (With
            several ranks, late work also runs after a while without progress: a real device goes
            on while its host waits for other hosts.)
freed       Freed memory holds NaN at once, unless `record_stream` announced work that may still
            use it.
ordered     Vector clocks check every use of memory. If two streams use the same bytes and one of
            them writes, an event or the host must order the two uses. New memory counts as used by
            the stream that allocates it, because a caching allocator reuses memory within a stream.
pinned      Pinned memory that a copy reads must not change before the host knows that the copy is
            done. Registered memory must not be unregistered before that. Memory of torch's own
            pinned allocator may be freed any time.

matched     A communicator matches collectives by their order alone. Ranks with different orders
            get each other's data. If kinds or sizes differ too, they get NaN. All communicators of
            a process run one after another, so ranks that start them in different orders block
            each other. Sums are computed in the dtype of the tensors. Messages between two ranks
            also match by order alone, and a send ends only when the other rank receives.
two         There are two devices. Each has its own memory, limit, statistics and streams.

`mistakes()` returns what was found. `set_limit` plans a lack of memory, `fail_collective` a
failure. Not modelled: kernels run at launch, although events say that they have not. So a blocked
device blocks the host at the next kernel. All threads of the host count as one. Nothing takes time.

`register()` makes the device known for the rest of the process. Then this module is `torch.sim`.
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
    """Return the compiled device.

    One for each source and torch version is kept in the system's temporary folder.
    """
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
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several test processes compiles
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
    torch.empty(
        1, pin_memory=True
    )  # torch recognises pinned memory only after it has once allocated some
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
    """Return the mistakes found since the last call."""
    return _simulated().mistakes()


def pending() -> int:
    """Return the number of copies and collectives that have not run yet."""
    return _simulated().pending()


def waits() -> int:
    """Return how often the host has waited for the device: for a stream, an event, a value or a
    copy.
    """
    return _simulated().waits()


def set_limit(nbytes: int) -> None:
    """Limit the memory of each device, in bytes."""
    _simulated().set_limit(nbytes)


def set_per_process_memory_fraction(fraction: float) -> None:
    set_limit(int(fraction * torch.accelerator.get_memory_info()[1]))


def fail_collective(after: int) -> None:
    """Let this rank's next `after` collectives succeed, and the one after them raise an error."""
    _simulated().fail_collective(after)


# -- what torch expects of a device's module


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def get_rng_state(device: object = None) -> torch.Tensor:
    """The device uses the CPU's generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


def manual_seed_all(seed: int) -> None:
    """Do nothing: torch seeds the CPU's generator itself."""


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def cudart() -> SimpleNamespace:
    """Return the calls that pin memory, under their names on CUDA and ROCm."""
    return SimpleNamespace(
        cudaHostRegister=_register_memory, cudaHostUnregister=_simulated().unregister_memory
    )


def _register_memory(address: int, nbytes: int, flags: int) -> int:
    _simulated().register_memory(address, nbytes)
    return 0
