"""A lack of host memory, as `ulimit -v` makes it: adapted to where activations are in it, and
explained.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.training import ds_config, relative, start, step
from tests.parity.models import build
from tests.processes import on_ranks
from zero.monitor.out_of_memory import full_memory

ROWS = 768
LARGE = 1 << 36  # bytes: more than malloc may have kept of what was freed
M_MMAP_THRESHOLD = -3  # of mallopt
NO_LIMIT, ENOUGH = resource.RLIM_INFINITY, 1 << 34
HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@contextmanager
def limited(nbytes: int) -> Iterator[Callable[[], int]]:
    """Context in which this process may use `nbytes` more addresses. The function returns how many
    it has used, if it has never used more.
    """
    in_use = addresses("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + nbytes, NO_LIMIT))
    try:
        yield lambda: addresses("VmPeak") - in_use
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (NO_LIMIT, NO_LIMIT))


def addresses(name: str) -> int:
    """A number of bytes in /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def train(act: str, nbytes: int) -> tuple[list[float] | str, int, int]:
    """The losses, or what is said if memory is not enough; how many addresses were used; and in
    how many slices a block runs its batch.
    """
    torch.manual_seed(3)
    ids = torch.randint(3, 97, (ROWS, 16))
    model: Any = build("llama")
    model.gradient_checkpointing_enable()  # what is left is to slice
    engine, _ = start(model, ds_config(**HOST) | {"on_out_of_memory": act})
    losses = step(engine, [{"input_ids": ids[:2], "labels": ids[:2]}])
    with limited(nbytes) as used:
        try:
            found = losses + step(engine, [{"input_ids": ids, "labels": ids}])
        except RuntimeError as error:
            found = str(error)
    number = engine.slices.number
    engine.destroy()
    return found, used(), number


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_lack_of_host_memory_is_adapted_to_and_explained(rank, world_size):
    """The last rank has less."""
    # Freed memory goes back to the system, so that each run needs new addresses.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 4096)
    usual, used, _ = train("explain", ENOUGH)
    losses, _, number = train("adapt", 3 * used // 4 if rank == world_size - 1 else ENOUGH)
    assert number > 1 and relative(losses, usual) < 1e-6
    if world_size == 1:
        text, _, _ = train("explain", used // 2)
        assert "on this rank: activations and temporary tensors" in text


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(LARGE),
        lambda: torch.empty(LARGE, device="meta").split(1),
        lambda: bytearray(LARGE),
        lambda: mmap.mmap(-1, LARGE),
    ],
    ids=["torch", "a vector", "Python", "a mapping"],
)
def test_errors_of_host_memory_are_recognised(allocate):
    with limited(LARGE // 2), pytest.raises((RuntimeError, MemoryError, OSError)) as raised:
        allocate()
    assert full_memory(raised.value) == "host"
