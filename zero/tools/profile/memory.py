"""In a process of the user's script: what memory holds during one step, by place and kind.

What the engine keeps is counted by walking over it. What else torch allocates on this thread
meanwhile is seen by a dispatch mode: storages that live on are activations, unless they were made
while gradients were collected or updates computed. So sums of one operation, and other threads'
buffers, are not seen. Samples are taken where memory changes: when a group is gathered or
resharded, a gradient is collected or reduced, and at the ends of phases."""

from __future__ import annotations

import functools
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero.core.param_group import ParamGroup
from zero.core.reduction import GradientReducer
from zero.device import is_accelerator
from zero.engine import ZeroEngine
from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.monitor.memory_usage import (
    BUFFERS,
    DEVICE,
    DISK,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    place_of,
    tensors,
)
from zero.optim.sharded_optimizer import ZeroOptimizer
from zero.tools.profile.brief import BriefRun
from zero.tools.profile.running import PROGRESS

ACTIVATIONS = "activations"


class Allocations(TorchDispatchMode):
    """Storages that operations have made and that still live: by address (place, kind, storage).

    `kind` is what new ones are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = ACTIVATIONS
        self.live: dict[int, tuple[str, str, weakref.ref]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if (
                isinstance(value, torch.Tensor)
                and value.layout == torch.strided
                and value.device.type != "meta"
            ):
                self.add(value, self.kind)
        return out

    def add(self, tensor: torch.Tensor, kind: str, replaces: bool = False) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.live or replaces:
            key = storage._cdata
            gone = weakref.ref(storage, lambda _: self.live.pop(key, None))
            self.live[key] = (place_of(tensor.device), kind, gone)


class MemoryRun(BriefRun):
    """Writes `rankN.json`: a list of samples, in the order of time.

    A sample: {"seconds": since the start of the step, "phase", "bytes": {place: {kind: bytes}},
    "resident": bytes of the process in host memory, "allocated": bytes of torch's allocator on the
    device}."""

    def __init__(self, engine: DeepSpeedEngine, folder: Path, step: int):
        super().__init__(engine, step, progress=folder / PROGRESS)
        self._folder = folder
        self._allocations = Allocations()
        self._is_on = False
        self._start = 0.0
        self.samples = []
        for method in ("all_gather", "reshard", "reshard_but_keep_aliases", "release"):
            self._wrap(ParamGroup, method)
        for method in ("collect", "reduce", "_start", "_finish"):
            self._wrap(GradientReducer, method, BUFFERS)
        self._wrap(ZeroOptimizer, "step", OPTIMIZER)
        self._wrap(ZeroEngine, "forward")
        self._wrap(ZeroEngine, "backward")
        if step == 1:
            self._begin()

    def after_update(self) -> None:
        if self.step_number == self.steps - 1:
            self._begin()
        elif self.step_number == self.steps:
            self._sample()
            self._is_on = False
            self._allocations.__exit__(None, None, None)
            (self._folder / f"rank{self.engine.comm.job.rank}.json").write_text(
                json.dumps(self.samples)
            )

    def _begin(self) -> None:
        self._start = time.perf_counter()
        self._is_on = True
        self._allocations.__enter__()
        self._sample()

    def _wrap(self, cls: type, method: str, kind: str | None = None) -> None:
        """Sample before and after each call. Storages that are made within it are of this kind."""
        original: Callable = getattr(cls, method)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return original(*args, **kwargs)
            if method == "collect":
                _, group, index = args
                self._allocations.add(group.params[index].grad, GRADIENTS, replaces=True)
            self._sample()
            outer, self._allocations.kind = self._allocations.kind, kind or self._allocations.kind
            try:
                return original(*args, **kwargs)
            finally:
                self._allocations.kind = outer
                if self._is_on:
                    self._sample()

        setattr(cls, method, wrapped)

    def _sample(self) -> None:
        found: dict[str, Counter[str]] = {DEVICE: Counter(), HOST: Counter(), DISK: Counter()}
        known: set[int] = set()
        for kind, place, tensor in tensors(self.engine):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                found[place][kind] += storage.nbytes()
        for key, (place, kind, storage) in list(self._allocations.live.items()):
            if key not in known and (alive := storage()) is not None:
                found[place][kind] += alive.nbytes()
        device = self.engine.comm.device
        self.samples.append(
            {
                "seconds": time.perf_counter() - self._start,
                "phase": self.engine.comm.clock.current,
                "bytes": {place: dict(kinds) for place, kinds in found.items() if kinds},
                "resident": _resident(),
                "allocated": torch.accelerator.memory_allocated() if is_accelerator(device) else 0,
            }
        )


def _resident() -> int:
    """Bytes of this process in host memory now; 0 where the system does not say."""
    file = Path("/proc/self/status")
    return int(file.read_text().partition("VmRSS:")[2].split()[0]) << 10 if file.exists() else 0
