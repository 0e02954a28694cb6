"""What a rank measures of itself: memory, model states and time."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def of_this_process(file: str = "status") -> dict[str, int]:
    """Read lines `name: number`: /proc/self/status, in bytes, or another file of the folder."""
    unit = 1024 if file == "status" else 1
    lines = (line.partition(":") for line in Path("/proc/self", file).read_text().splitlines())
    return {
        name.strip(): unit * int(words[0])
        for name, _, text in lines
        if (words := text.split()) and words[0].isdigit()
    }


def let_go() -> None:
    """Free the last engine, which is in reference cycles, and give its memory back to the
    system.
    """
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)


def forget_peaks() -> None:
    """Reset the peaks of memory. Memory that building needed is first given back to the system."""
    let_go()
    Path("/proc/self/clear_refs").write_text("5")
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


class PeakMemory:
    """A context that samples this process's memory in bytes: `kind` is a field of
    /proc/self/status.

    Attributes: most: the largest sample. extra: its growth since the beginning.
    """

    def __init__(self, kind: str = "RssAnon"):
        self.kind = kind

    def __enter__(self) -> PeakMemory:
        self.first = self.most = of_this_process()[self.kind]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, of_this_process()[self.kind])

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.extra = self.most - self.first


def timed(act: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Act when all ranks are here. Returns `seconds` and `cpu` (of all threads of this process),
    and what `act` returned.
    """
    if dist.is_initialized():
        dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    result = act()
    return {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}, result


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """Return the bytes of each distinct storage by its address: `shard` may be a part of `full`."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def state_bytes(engine: Any) -> dict[str, int]:
    """Return the bytes of model states that this rank holds now. No storage counts twice."""
    groups, shards = engine.groups, engine.optimizer.shards.values()
    moments = [
        value
        for state in engine.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    parts = {
        "parameters": bytes_of(tensor for group in groups for tensor in (group.full, group.shard)),
        "gradients": bytes_of(shard.grad for shard in shards),
        "accumulated": bytes_of(engine.reducer.gradients[group].carried for group in groups),
        "optimizer": bytes_of([*(shard.master for shard in shards), *moments]),
    }
    for address in parts["parameters"]:
        parts["optimizer"].pop(address, None)  # in fp32 a master is the parameter itself
    return {name: sum(found.values()) for name, found in parts.items()}
