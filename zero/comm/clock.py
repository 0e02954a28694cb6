"""Measures where the time of a step goes: the seconds of each phase, and those spent waiting. Also
reports the progress of slow phases.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

# Seconds between two lines about the progress of a phase.
_PATIENCE = 10.0


def label(text: str) -> AbstractContextManager:
    """Context whose operations torch's profiler, or NVTX, shows as `zero: text`, in any thread.

    It costs nothing while none runs.
    """
    is_on = torch.autograd.profiler._is_profiler_enabled
    return record_function(f"zero: {text}") if is_on else nullcontext()


class Progress:
    """Prints how far slow work is. Quick work prints nothing."""

    def __init__(self, shows: bool, what: str):
        self._shows = shows
        self._what = what
        self._done = 0
        self._spoke = time.perf_counter()

    def advance(self, total: int) -> None:
        """One more of about `total` parts is done."""
        self._done += 1
        if self._shows and time.perf_counter() - self._spoke > _PATIENCE:
            self._spoke = time.perf_counter()
            print(f"{self._what}: {self._done} of about {total} parts", file=sys.stderr, flush=True)


class Clock:
    """Counts wall-clock seconds of this rank since `reset`. With `shows`, slow phases print their
    progress.

    Attributes:
        phases: seconds in forward, backward and step.
        waits: by (phase, what was waited for), the part of them in which this rank computed
            nothing: "gather" (other ranks' shards), "reduce" (their gradients), "file" (reading
            parameters), "optimizer" (a late update), "gradients out" (to host memory or a file),
            "whole tensors" (between ranks, for Muon and others).
        current: the phase that runs, or "other".

    On a GPU the host waits for little. The work that it enqueues waits on the device, where a
    profiler shows it under the same names.
    """

    def __init__(self, shows: bool = False) -> None:
        self.shows = shows
        self.progress = Progress(False, "other")
        self.phases: defaultdict[str, float] = defaultdict(float)
        self.waits: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.current = "other"

    def reset(self) -> None:
        self.phases.clear()
        self.waits.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context of a phase; an inner one is counted in the outer one as well."""
        outer, self.current, start = self.current, name, time.perf_counter()
        before, self.progress = self.progress, Progress(self.shows, name)
        try:
            with label(name):
                yield
        finally:
            self.current = outer
            self.progress = before
            self.phases[name] += time.perf_counter() - start

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context of a wait for `what`."""
        start = time.perf_counter()
        try:
            with label(f"wait for {what}"):
                yield
        finally:
            self.waits[self.current, what] += time.perf_counter() - start

    def __str__(self) -> str:
        waits: dict[str, list[str]] = {phase: [] for phase in self.phases}
        for (phase, what), spent in self.waits.items():
            waits.setdefault(phase, []).append(f"{what} {spent:.3f}")
        return "; ".join(
            f"{phase} {self.phases[phase]:.3f} s" + f" (waited for {', '.join(of)})" * bool(of)
            for phase, of in waits.items()
        )
