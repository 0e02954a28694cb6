"""Runs in a process of the user's script: records one step with torch's profiler, which sees the
device and all threads, with the engine's labels (`zero.comm.clock.label`).

`merge` makes one trace of those of all ranks. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (times in
microseconds)."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, supported_activities

from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.tools.profile.bounded_run import BoundedRun, bound_first_engine
from zero.tools.profile.running import SNAPSHOT

MAIN, MESSAGES = "main thread", "messages"
# torch's own spans of what a backend has in flight. One may end later than what began after it.
_MESSAGES = ("gloo:", "nccl:")
_LABEL = "zero: "
# So many processes of the trace belong to one rank: its host, and its devices.
_PROCESSES = 100

Event = dict[str, Any]
_TRACK = itemgetter("pid", "tid")


def _has_history(device: torch.device) -> bool:
    """Whether torch can write down each allocation on `device`, with the lines that made it."""
    return device.type == "cuda"


class TraceRun(BoundedRun):
    """Writes `rankN.json`, as torch's profiler exports it, with the process that is the host, and
    on a GPU `rankN.pickle`, torch's own record of allocations. Both are of the step number `step`,
    from the end of the one before.
    """

    def __init__(self, engine: DeepSpeedEngine, folder: Path, step: int):
        super().__init__(engine, folder, step)
        all_threads = _ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=supported_activities(), experimental_config=all_threads)
        self._file = folder / f"rank{engine.comm.job.rank}.json"
        if step == 1:
            self._begin()

    def after_update(self) -> None:
        if self.step_number == self.steps - 1:
            self._begin()
        elif self.step_number == self.steps:
            self._stop_profile()
            if _has_history(self.engine.comm.device):
                torch.cuda.memory._dump_snapshot(str(self._file.with_suffix(SNAPSHOT)))
                torch.cuda.memory._record_memory_history(enabled=None)
            partial = self._file.with_suffix(".part")
            self._profile.export_chrome_trace(str(partial))
            partial.rename(self._file)

    def _begin(self) -> None:
        if _has_history(self.engine.comm.device):
            torch.cuda.memory._record_memory_history(stacks="python")
        self._profile.__enter__()
        self._profile.add_metadata("host", str(os.getpid()))
        atexit.register(self._stop_profile)  # it crashes an interpreter that ends before it

    def _stop_profile(self) -> None:
        atexit.unregister(self._stop_profile)
        self._profile.__exit__(None, None, None)


def set_up() -> None:
    """Have `initialize` record a step of the first engine."""
    bound_first_engine(TraceRun)


def merge(files: Iterable[Path]) -> dict[str, Any]:
    """One trace of all ranks' files: each rank is a process with named tracks, and each of its
    devices is another.
    """
    ranks = {
        int(file.stem.removeprefix("rank")): json.loads(file.read_text(encoding="utf-8"))
        for file in files
    }
    first = min(recorded["baseTimeNanoseconds"] for recorded in ranks.values())
    merged: list[Event] = []
    for rank, recorded in sorted(ranks.items()):
        shift = (recorded["baseTimeNanoseconds"] - first) / 1000
        events = sorted(_in_tracks(recorded["traceEvents"], int(recorded["host"])), key=_TRACK)
        for number, ((process, track), of_track) in enumerate(groupby(events, _TRACK)):
            place = {"pid": rank * _PROCESSES + process, "tid": number}
            for event in of_track:
                own_id = {"id": f"{rank}.{event['id']}"} if "id" in event else {}
                merged.append(event | place | own_id | {"ts": event["ts"] + shift})
            title = f"rank {rank}" + (f", device {process - 1}" if process else "")
            name = place | {"ph": "M"}
            merged += [
                name | {"name": "process_name", "args": {"name": title}},
                name | {"name": "process_sort_index", "args": {"sort_index": place["pid"]}},
                name | {"name": "thread_name", "args": {"name": track}},
                name | {"name": "thread_sort_index", "args": {"sort_index": place["tid"]}},
            ]
    return {"traceEvents": merged, "displayTimeUnit": "ms"}


def _in_tracks(events: list[Event], host: int) -> Iterator[Event]:
    """The profiler's events. "pid" is 0 for the process `host` and 1 + its number for a device;
    "tid" is the name of a track. Messages that are in flight at the same time get tracks of their
    own, because the events of one must nest.
    """
    ends: list[float] = []
    known = (event for event in events if event["ph"] in "Xsf" and type(event["pid"]) is int)
    for event in sorted(known, key=lambda event: event["ts"]):
        process, thread = event["pid"], event["tid"]
        if event.get("cat") == "fwdbwd":
            continue
        if process != host:
            process, track = 1 + process, f"stream {thread}"
        elif event["ph"] == "X" and event["name"].startswith(_MESSAGES):
            start, process = event["ts"], 0
            lane = next((number for number, end in enumerate(ends) if end <= start), len(ends))
            ends[lane : lane + 1] = [start + event["dur"]]
            track = f"{MESSAGES} ({lane + 1})" if lane else MESSAGES
        else:
            process, track = 0, MAIN if thread == host else f"thread {thread}"
        yield event | {"pid": process, "tid": track, "name": event["name"].removeprefix(_LABEL)}
