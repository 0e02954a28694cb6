"""The compute device: everything that the engine needs of an accelerator (streams, events, free and
pinned memory) is here.

It knows nothing about the meaning of tensors, ranks or settings. A machine without an accelerator
computes on "cpu". Nothing is asynchronous there: streams and events are not needed, and
synchronizing does nothing."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

CPU = torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    """Whether work on `device` runs beside the host's, in streams."""
    return device.type != "cpu"


def accelerator(number: int = 0) -> torch.device | None:
    """The accelerator for a process with this number on its host; None where torch sees none."""
    if (found := torch.accelerator.current_accelerator(check_available=True)) is None:
        return None
    return torch.device(found.type, number % torch.accelerator.device_count())


def use(device: torch.device) -> None:
    """Make `device` the current one of this thread."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device.index)


def synchronize(device: torch.device) -> None:
    """Block until everything that was started on `device` is done."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give memory that no tensor uses back to the system."""
    if is_accelerator(device):
        torch.accelerator.empty_cache()


# -- streams


def new_stream(device: torch.device) -> torch.Stream:
    """A stream beside the one that computes; `with stream:` makes it the current one."""
    return torch.Stream(device)


def compute_stream(device: torch.device) -> torch.Stream:
    """The stream that computes now."""
    return torch.accelerator.current_stream(device)


@contextlib.contextmanager
def beside(
    device: torch.device, ready: torch.Event | None, stream: torch.Stream | None = None
) -> Iterator[torch.Stream | None]:
    """Context of a thread whose current stream is `stream`, or a new one, which waits for `ready`.

    None on the CPU.
    """
    if ready is None:
        yield None
        return
    use(device)
    stream = stream or new_stream(device)
    stream.wait_event(ready)
    with stream:
        yield stream


def ready_for_thread(device: torch.device) -> torch.Event | None:
    """An event at the end of what this thread has given to `device` so far, for `beside`.

    None on the CPU.
    """
    return compute_stream(device).record_event() if is_accelerator(device) else None


def mark(device: torch.device) -> Callable[[], bool]:
    """A function that says whether all work is done that this thread's current stream has been
    given so far.
    """
    use(device)
    return compute_stream(device).record_event().query


# -- memory


def memory_in_use(device: torch.device) -> int:
    """Bytes that torch's allocator has given out on an accelerator; on the host, the resident size
    of this process.
    """
    if is_accelerator(device):
        return torch.accelerator.memory_allocated(device)
    return psutil.Process().memory_info().rss


def peak_memory(device: torch.device) -> int:
    """The largest `memory_in_use` of this process so far."""
    if is_accelerator(device):
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # The kernel's two counters are not exact: the present size may be a little above its peak.
    return max(peak, memory_in_use(device))


def host_memory() -> tuple[int, int]:
    """(bytes that are free, all bytes) of the host: this rank's share of what its container has."""
    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    limit, used = _of_container("memory.max"), _of_container("memory.current")
    if limit is not None and used is not None:
        cached = _of_container("memory.stat", "file") or 0
        available, total = min(available, limit - used + cached), min(total, limit)
    if (most := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        available = min(available, most - psutil.Process().memory_info().vms)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return available // ranks, total // ranks


def _of_container(name: str, line: str = "") -> int | None:
    """A number of this process's control group (version 2), in one of the file's lines, or None if
    there is none.
    """
    path = Path("/sys/fs/cgroup") / name
    lines = path.read_text().splitlines() if path.exists() else []
    text = next((text.removeprefix(line).strip() for text in lines if text.startswith(line)), "")
    return int(text) if text.isdigit() else None


def can_register() -> bool:
    """Whether `pin` can work on this machine: CUDA and ROCm can register existing memory."""
    return torch.accelerator.is_available() and hasattr(torch.get_device_module(), "cudart")


def pin(address: int, nbytes: int) -> int:
    """Page-lock memory for copies to the accelerator. Returns 0, or the runtime's error code."""
    code = int(torch.get_device_module().cudart().cudaHostRegister(address, nbytes, 0))
    if code != 0:
        # CUDA raises the error of a failed call at the next launch of a kernel. So launch one here.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=torch.accelerator.current_accelerator())
    return code


def unpin(address: int, memory: mmap.mmap, device: int) -> None:
    """Undo `pin`, after copies from and to the memory on the accelerator of this number.

    The garbage collector calls it, maybe while such copies are under way. `memory` is an argument
    so that it is unmapped after this."""
    torch.accelerator.synchronize(device)
    torch.get_device_module().cudart().cudaHostUnregister(address)


# -- random numbers


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the accelerator's generator, on the host."""
    return torch.get_device_module(device).get_rng_state(device)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    torch.get_device_module(device).set_rng_state(state, device)
