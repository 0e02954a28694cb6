"""Runs in a process of the user's script: records what memory contains during one step, by place
and kind.

What the engine keeps is counted by walking over it. What else torch allocates in the meantime is
seen by a dispatch mode, and counts as activations. Buffers of other threads are not seen. Samples
are taken where memory has changed."""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.monitor.memory_usage import place_of, tensors
from zero.tools.profile.bounded_run import RecordedStep, bound_first_engine
from zero.tools.profile.command import SNAPSHOT

ACTIVATIONS = "activations"
# A sample is taken when this part of the largest size so far was allocated or freed.
_RESOLUTION = 1 / 256


def set_up() -> None:
    """Have `initialize` record a step of the first engine."""
    bound_first_engine(MemoryRun)


class Allocations(TorchDispatchMode):
    """Storages that operations have made and that still live.

    `changed` is called before each operation, when results of the one before it have their place.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed
        self.live: dict[int, weakref.ref] = {}
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self._changed()
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if (
                isinstance(value, torch.Tensor)
                and value.layout == torch.strided
                and value.device.type != "meta"
            ):
                self._add(value.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.live:
            return

        def forget(_: object) -> None:
            del self.live[key]
            self.nbytes -= nbytes

        self.live[key] = weakref.ref(storage, forget)
        self.nbytes += nbytes


def _has_history(device: torch.device) -> bool:
    """Whether torch can write down each allocation on `device`, with the lines that made it."""
    return device.type == "cuda"


class MemoryRun(RecordedStep):
    """Writes `rankN.json`, and on a GPU `rankN.pickle`, torch's own record of allocations.

    The first is a list of samples, in the order of time. A sample: {"seconds": since the start of
    the step, "phase", "bytes": {place: {kind: bytes}}}."""

    def __init__(self, engine: DeepSpeedEngine, folder: Path, step: int):
        self._allocations = Allocations(self._sample_if_changed)
        self._samples: list[dict[str, Any]] = []
        self._last: tuple[str, int] = ("", 0)
        self._most = 0
        super().__init__(engine, folder, step)

    def begin_recording(self) -> None:
        if _has_history(self.engine.comm.device):
            torch.cuda.memory._record_memory_history()
        self._start = time.perf_counter()
        self._sample()
        self._allocations.__enter__()

    def end_recording(self) -> None:
        self._allocations.__exit__(None, None, None)
        self._sample()
        if _has_history(self.engine.comm.device):
            torch.cuda.memory._dump_snapshot(str(self.file.with_suffix(SNAPSHOT)))
            torch.cuda.memory._record_memory_history(enabled=None)
        self.file.write_text(json.dumps(self._samples))

    def _sample_if_changed(self) -> None:
        engine = self.engine
        gathered = engine.residency.live * engine.settings.compute_dtype.itemsize
        phase, nbytes = engine.comm.clock.current, self._allocations.nbytes + gathered
        self._most = max(self._most, nbytes)
        if phase != self._last[0] or abs(nbytes - self._last[1]) > self._most * _RESOLUTION:
            self._last = phase, nbytes
            self._sample()

    def _sample(self) -> None:
        engine = self.engine
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        known: set[int] = set()

        def add(kind: str, place: str, storage: torch.UntypedStorage) -> None:
            if storage._cdata not in known:
                known.add(storage._cdata)
                found[place][kind] += storage.nbytes()

        for kind, place, tensor in tensors(engine):
            add(kind, place, tensor.untyped_storage())
        for reference in list(self._allocations.live.values()):
            if (storage := reference()) is not None:
                add(ACTIVATIONS, place_of(storage.device), storage)
        self._samples.append(
            {
                "seconds": time.perf_counter() - self._start,
                "phase": engine.comm.clock.current,
                "bytes": {place: dict(kinds) for place, kinds in found.items()},
            }
        )
