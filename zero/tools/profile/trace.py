"""In a process of the user's script: one step as events of Chrome's trace format, by torch's
profiler and `Spans`.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (times
in microseconds)."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.profiler import profile, supported_activities

from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.tools.profile.brief import BriefRun
from zero.tools.profile.running import PROGRESS
from zero.tools.profile.spans import TRACKS, Span, Spans

# Tracks made of the engine's labels (`zero.comm.clock.label`).
_LABEL, _WAIT = "zero: ", "zero: wait for "
_PHASES = tuple(_LABEL + phase for phase in ("forward", "backward", "step"))
PHASES, WAITS, COMPUTE = "phases", "waits", "compute"
# torch's own spans of what a backend has in flight.
_COLLECTIVES = ("gloo:", "nccl:")
MESSAGES = "messages"
# So many processes of the trace belong to one rank: its host, and its devices.
_PROCESSES = 100

Event = dict[str, Any]


class TraceRun(BriefRun):
    """Writes `rankN.json`: {"start": nanoseconds since the epoch, "events": with times since
    then}.
    """

    def __init__(self, engine: DeepSpeedEngine, folder: Path, step: int):
        super().__init__(engine, step, progress=folder / PROGRESS)
        self._folder = folder
        self._spans = Spans()
        self._profile = profile(activities=supported_activities())
        self._start: int | None = None
        if step == 1:
            self._begin()

    def after_update(self) -> None:
        if self.step_number == self.steps - 1:
            self._begin()
        elif self.step_number == self.steps:
            self._write()

    def _begin(self) -> None:
        self._profile.__enter__()
        atexit.register(self._stop_profile)  # it crashes an interpreter that ends before it
        self._start = time.time_ns()
        self._spans.is_on = True

    def _stop_profile(self) -> None:
        atexit.unregister(self._stop_profile)
        self._profile.__exit__(None, None, None)

    def _write(self) -> None:
        spans = self._spans.stop()
        self._stop_profile()
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "torch.json")
            self._profile.export_chrome_trace(file)
            recorded = json.loads(Path(file).read_text(encoding="utf-8"))
        rank = self.engine.comm.job.rank
        events = list(
            in_lanes(
                [*events_of_torch(recorded, self._start), *events_of_spans(spans, self._start)]
            )
        )
        file = self._folder / f"rank{rank}.json"
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps({"start": self._start, "events": events}), encoding="utf-8")
        partial.rename(file)


def events_of_torch(recorded: dict[str, Any], start: int) -> Iterator[Event]:
    """The profiler's events. The engine's phases and waits have tracks of their own.

    `start`: nanoseconds since the epoch, from which times count in the result. "pid" is 0 for the
    host and 1 + its number for a device; "tid" is the name of a track."""
    shift, host = (recorded.get("baseTimeNanoseconds", 0) - start) / 1000, os.getpid()
    for event in recorded["traceEvents"]:
        if (
            event["ph"] not in "Xsf"
            or event.get("cat") == "fwdbwd"
            or not isinstance(event["pid"], int)
        ):
            continue
        name, thread = event["name"], event["tid"]
        if event["pid"] != host:
            process, track = 1 + event["pid"], f"stream {thread}"
        elif name.startswith(_WAIT) or name in _PHASES:
            process, track = 0, WAITS if name.startswith(_WAIT) else PHASES
        elif name.startswith(_COLLECTIVES) and event["ph"] == "X":
            process, track = 0, MESSAGES  # they end later than what began after them
        else:
            process, track = 0, COMPUTE if thread == host else f"{COMPUTE}, thread {thread}"
        yield event | {
            "ts": event["ts"] + shift,
            "pid": process,
            "tid": track,
            "name": name.removeprefix(_LABEL),
        }


def events_of_spans(spans: Iterable[Span], start: int) -> Iterator[Event]:
    """Events as of `events_of_torch`."""
    for span in spans:
        times = {"ts": (span.start - start) / 1000, "dur": (span.end - span.start) / 1000}
        yield {
            "ph": "X",
            "cat": "zero",
            "name": span.name,
            "pid": 0,
            "tid": span.track,
            **times,
            "args": span.facts,
        }


def in_lanes(events: Iterable[Event]) -> Iterator[Event]:
    """Events of one track must nest.

    So those that were in flight at the same time get tracks of the same name.
    """
    ends: dict[str, list[float]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["tid"] in (MESSAGES, *TRACKS):
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
    first = min(each["start"] for each in ranks.values())
    merged: list[Event] = []
    for rank, each in sorted(ranks.items()):
        shift, numbers = (each["start"] - first) / 1000, {}
        places = {(event["pid"], event["tid"]) for event in each["events"]}
        for number, (process, track) in enumerate(sorted(places, key=_position)):
            pid, numbers[process, track] = rank * _PROCESSES + process, number
            title = f"rank {rank}" if process == 0 else f"rank {rank}, device {process - 1}"
            for kind, about in (
                ("process_name", {"name": title}),
                ("process_sort_index", {"sort_index": pid}),
            ):
                merged.append({"ph": "M", "name": kind, "pid": pid, "tid": number, "args": about})
            for kind, about in (
                ("thread_name", {"name": track}),
                ("thread_sort_index", {"sort_index": number}),
            ):
                merged.append({"ph": "M", "name": kind, "pid": pid, "tid": number, "args": about})
        for event in each["events"]:
            place = {
                "pid": rank * _PROCESSES + event["pid"],
                "tid": numbers[event["pid"], event["tid"]],
            }
            if "id" in event:
                place["id"] = f"{rank}.{event['id']}"
            merged.append(event | place | {"ts": event["ts"] + shift})
    return {"traceEvents": merged, "displayTimeUnit": "ms"}


def _position(place: tuple[int, str]) -> tuple[int, int, str]:
    process, track = place
    known = [
        number
        for number, name in enumerate((PHASES, WAITS, COMPUTE, *TRACKS, MESSAGES))
        if track.startswith(name)
    ]
    return process, known[0] if known else -1, track
