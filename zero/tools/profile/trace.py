"""Runs in a process of the user's script: records one step as events of Chrome's trace format.

torch's profiler sees the device and all threads, with the labels of `zero.comm.clock.label`. The
engine's observer reports what else is in flight.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (times
in microseconds)."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, supported_activities

from zero.comm.observer import Operation, set_observer
from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.tools.profile.bounded_run import RecordedStep, bound_first_engine

# From the top of the picture to the bottom. In all but the first, one may end later than what began
# after it.
MAIN, GATHERS, REDUCTIONS = "main thread", "all-gathers in flight", "reductions in flight"
OTHERS, COPIES, MESSAGES = "other collectives", "copies", "messages"
_FROM_THE_TOP = (MAIN, GATHERS, REDUCTIONS, OTHERS, COPIES, MESSAGES)

_LABEL = "zero: "
# torch's own spans of what a backend has in flight.
_MESSAGES = ("gloo:", "nccl:")
# So many processes of the trace belong to one rank: its host, and its devices.
_PROCESSES = 100

Event = dict[str, Any]


class TraceRun(RecordedStep):
    """Writes `rankN.json`: {"start": nanoseconds since the epoch, "events": with times since
    then}.
    """

    def __init__(self, engine: DeepSpeedEngine, folder: Path, step: int):
        all_threads = _ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=supported_activities(), experimental_config=all_threads)
        self._in_flight = InFlight()
        super().__init__(engine, folder, step)

    def begin_recording(self) -> None:
        self._profile.__enter__()
        atexit.register(self._stop_profile)  # it crashes an interpreter that ends before it
        self._start = time.time_ns()
        set_observer(self._in_flight)

    def _stop_profile(self) -> None:
        atexit.unregister(self._stop_profile)
        self._profile.__exit__(None, None, None)

    def end_recording(self) -> None:
        set_observer(None)
        in_flight = self._in_flight.events(self._start)
        self._stop_profile()
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "torch.json")
            self._profile.export_chrome_trace(file)
            recorded = json.loads(Path(file).read_text(encoding="utf-8"))
        events = list(in_lanes([*events_of_torch(recorded, self._start), *in_flight]))
        partial = self.file.with_suffix(".part")
        partial.write_text(json.dumps({"start": self._start, "events": events}), encoding="utf-8")
        partial.rename(self.file)


def set_up() -> None:
    """Have `initialize` record a step of the first engine."""
    bound_first_engine(TraceRun)


class InFlight:
    """An observer that keeps operations with the times (in nanoseconds since the epoch) of their
    start and of the first use of their result.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[Operation, int, list[int]]] = []

    def begin(self, operation: Operation) -> Callable[[], None]:
        end: list[int] = []
        self._spans.append((operation, time.time_ns(), end))
        return lambda: end.append(time.time_ns())

    def events(self, origin: int) -> Iterator[Event]:
        """As of `events_of_torch`. What is in flight still ends now."""
        now = time.time_ns()
        for operation, start, end in self._spans:
            tensor = operation.tensor
            yield {
                "ph": "X",
                "cat": "zero",
                "name": getattr(operation.what, "name", operation.name),
                "pid": 0,
                "tid": _track(operation),
                "ts": (start - origin) / 1000,
                "dur": ((end or [now])[0] - start) / 1000,
                "args": {"elements": tensor.numel(), "bytes": tensor.nbytes},
            }


def _track(operation: Operation) -> str:
    if operation.name in ("load", "store"):
        return COPIES
    if operation.name == "all_gather":
        return GATHERS
    # Quantized gradients go by all-to-all, as whole tensors do, which are about no group.
    is_reduction = operation.name == "reduce_scatter" or operation.what is not None
    return REDUCTIONS if is_reduction else OTHERS


def events_of_torch(recorded: dict[str, Any], origin: int) -> Iterator[Event]:
    """The profiler's events, with the engine's labels.

    `origin`: nanoseconds since the epoch, from which times count in the result. "pid" is 0 for the
    host and 1 + its number for a device; "tid" is the name of a track."""
    shift, host = (recorded.get("baseTimeNanoseconds", 0) - origin) / 1000, os.getpid()
    for event in recorded["traceEvents"]:
        process, thread = event["pid"], event["tid"]
        if event["ph"] not in "Xsf" or event.get("cat") == "fwdbwd" or type(process) is not int:
            continue
        place = 1 + process, f"stream {thread}"
        if process == host:
            place = 0, MAIN if thread == host else f"thread {thread}"
            if event["ph"] == "X" and event["name"].startswith(_MESSAGES):
                place = 0, MESSAGES
        name = event["name"].removeprefix(_LABEL)
        yield event | {"ts": event["ts"] + shift, "pid": place[0], "tid": place[1], "name": name}


def in_lanes(events: Iterable[Event]) -> Iterator[Event]:
    """Events of one track must nest.

    So those that were in flight at the same time get tracks of the same name.
    """
    ends: dict[str, list[float]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["tid"] in _FROM_THE_TOP[1:]:
            lanes, start = ends[event["tid"]], event["ts"]
            lane = next((number for number, end in enumerate(lanes) if end <= start), len(lanes))
            lanes[lane : lane + 1] = [start + event["dur"]]
            event["tid"] += f" ({lane + 1})" if lane else ""
        yield event


def merge(files: Iterable[Path]) -> dict[str, Any]:
    """One trace of all ranks' files: each rank is a process with named tracks, and each of its
    devices is another.
    """
    ranks = {
        int(file.stem.removeprefix("rank")): json.loads(file.read_text(encoding="utf-8"))
        for file in files
    }
    first = min(recorded["start"] for recorded in ranks.values())
    merged: list[Event] = []
    for rank, recorded in sorted(ranks.items()):
        shift, events = (recorded["start"] - first) / 1000, recorded["events"]
        tracks = sorted({(event["pid"], event["tid"]) for event in events}, key=_position)
        numbers = {track: number for number, track in enumerate(tracks)}
        for (process, track), number in numbers.items():
            title = f"rank {rank}" + (f", device {process - 1}" if process else "")
            place = {"ph": "M", "pid": rank * _PROCESSES + process, "tid": number}
            merged += [
                place | {"name": "process_name", "args": {"name": title}},
                place | {"name": "process_sort_index", "args": {"sort_index": place["pid"]}},
                place | {"name": "thread_name", "args": {"name": track}},
                place | {"name": "thread_sort_index", "args": {"sort_index": number}},
            ]
        for event in events:
            place = {
                "pid": rank * _PROCESSES + event["pid"],
                "tid": numbers[event["pid"], event["tid"]],
                "ts": event["ts"] + shift,
            }
            if "id" in event:
                place["id"] = f"{rank}.{event['id']}"
            merged.append(event | place)
    return {"traceEvents": merged, "displayTimeUnit": "ms"}


def _position(place: tuple[int, str]) -> tuple[int, int, str]:
    process, track = place
    above = [number for number, name in enumerate(_FROM_THE_TOP) if track.startswith(name)]
    return process, *(above or [len(_FROM_THE_TOP)]), track
