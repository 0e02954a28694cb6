"""Reads what `json_monitor` writes, and computes what the page shows.

This file knows nothing about the page's looks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

from zero.errors import UsageError, rounded, size

FILE = "steps.jsonl"
# Of transformers' Trainer: its record, and how the names of an evaluation's metrics begin.
_STATE, _EVALUATION = "trainer_state.json", "eval_"
# What a record of a step must have.
_KEYS = {"step", "samples", "lr", "seconds", "waits", "memory", "ranks", "samples_per_second"}
REST = "data and script"
_PHASES = ("forward", "backward", "step")


class Run:
    """One run's records by step, in order. If a step was trained twice, because the run was
    resumed, the second record counts.

    Attributes:
        name: the run's name.
        records: the records of the steps, in order.
        evaluations: what the Trainer has logged of evaluations.
        facts: what `zero.monitor.run_info` wrote at the last start, or {}.
        resumed: the first step of each start but the first.
        warnings: (step, text).
    """

    def __init__(
        self,
        name: str,
        records: list[dict[str, Any]],
        evaluations: Sequence[dict[str, Any]] = (),
    ):
        self.name = name
        self.evaluations = [{"step": 0, **each} for each in evaluations]
        # Rank 0's seconds from the end of the step before to the end of this one.
        for record in records:
            working, waits = record["ranks"]["working_seconds"][0], record["waits"].values()
            record["duration"] = working + sum(waits)
        last = {record["step"]: record for record in records}
        self.records = [last[step] for step in sorted(last)]
        starts = [record["run"] for record in records if "run" in record]
        self.facts = starts[-1] if starts else {}
        self.resumed = [record["step"] for record in records if "run" in record][1:]
        self.warnings = [
            (record["step"], text) for record in records for text in record.get("warnings", ())
        ]

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a number of the records; steps without it are left out."""
        source = self.evaluations if key.startswith(_EVALUATION) else self.records
        points = [(each["step"], each[key]) for each in source if each.get(key) is not None]
        return [step for step, _ in points], [value for _, value in points]

    def metrics(self) -> list[str]:
        """The names of the evaluations' metrics, without their speed."""
        names = dict.fromkeys(name for each in self.evaluations for name in each)
        kept = [name for name in names if name.startswith(_EVALUATION)]
        return [name for name in kept if not name.endswith(("_runtime", "_per_second"))]

    @property
    def _usual(self) -> list[dict[str, Any]]:
        """The records but the first: in the first step memory is allocated and the schedule is
        recorded.
        """
        return self.records[1:] or self.records

    def time_by_part(self) -> dict[str, float]:
        """Mean seconds of a step on rank 0: what each phase computes, what is waited for, and the
        rest.
        """
        total: Counter[str] = Counter(dict.fromkeys((*_PHASES, REST), 0))
        for record in self._usual:
            phases = {phase: record["seconds"].get(phase, 0.0) for phase in _PHASES}
            rest = record["duration"] - sum(phases.values())
            for name, spent in record["waits"].items():
                phase, _, cause = name.partition("_")
                total[f"wait: {cause.replace('_', ' ')}"] += spent
                if phase in phases:
                    phases[phase] -= spent
                else:
                    rest -= spent
            total.update(phases | {REST: rest})
        return {part: max(0.0, seconds) / len(self._usual) for part, seconds in total.items()}

    def mean_of(self, key: str) -> dict[str, float]:
        """Mean bytes of a step on rank 0: "bytes" by collective, "links" by link.

        Those over which nothing went are left out.
        """
        total: Counter[str] = Counter()
        for record in self._usual:
            total.update(record.get(key, {}))
        return {name: count / len(self._usual) for name, count in total.items() if count}

    def seconds_by_rank(self) -> list[tuple[int, float]]:
        """Mean seconds of a step in which each rank worked. A run may continue with another number
        of ranks: each has the mean over the steps that it took part in.
        """
        steps = [record["ranks"]["working_seconds"] for record in self._usual]
        return [
            (rank, fmean(spent for spent in of_rank if spent is not None))
            for rank, of_rank in enumerate(zip_longest(*steps))
        ]

    def summary(self) -> dict[str, str]:
        losses, seconds = self.curve("loss")[1], self.time_by_part()
        waited = sum(spent for part, spent in seconds.items() if part.startswith("wait"))
        memory = self.records[-1]["memory"]
        samples = median(each["samples_per_second"] for each in self._usual)
        seconds_a_step = median(each["duration"] for each in self._usual)
        found = {
            "steps": f"{self.records[0]['step']} to {self.records[-1]['step']}",
            "skipped steps": str(sum(bool(each.get("skipped")) for each in self.records)),
            "last loss": f"{losses[-1]:.5g}" if losses else "not known",
            "samples a second (slowest rank), median": rounded(samples, 4),
            "seconds a step (rank 0), median": rounded(seconds_a_step, 4),
            "exposed waits": f"{waited / max(sum(seconds.values()), 1e-12):.1%}",
            "peak host memory": size(memory["host_bytes_peak"]),
        }
        if utilizations := [each["mfu"] for each in self._usual if each.get("mfu")]:
            found["MFU"] = f"{median(utilizations):.1%}"
        for name in ("read", "written"):
            rates = [each.get("disk_bytes_per_second", {}).get(name) for each in self._usual]
            if rates := [rate for rate in rates if rate]:
                found[f"disk, {name} a second"] = size(median(rates))
        if memory["device_bytes_peak"]:
            found["peak device memory"] = size(memory["device_bytes_peak"])
        for name in self.metrics():
            if values := self.curve(name)[1]:
                found[f"last {name}"] = f"{values[-1]:.5g}"
        if "parameters" in self.facts:
            found["parameters"] = f"{self.facts['parameters']:,}"
        return found


def file_of(path: Path) -> Path:
    """The records of a run, of which `path` is the folder or the file itself."""
    return path / FILE if path.is_dir() else path


def read(path: Path) -> Run:
    """The run whose file, or folder with `steps.jsonl`, is `path`.

    Raises UsageError with the line that is wrong.
    """
    file = file_of(path)
    if not file.is_file():
        raise UsageError(f"report: {file}: there is no such file; json_monitor writes it")
    records, lines = [], file.read_bytes().splitlines(keepends=True)
    if len(lines) > 1 and not lines[-1].endswith(b"\n"):
        lines.pop()  # the run was killed, or the disk full, while it was written
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = {}
        is_record = isinstance(record, dict) and record.keys() >= _KEYS
        if not is_record or not isinstance(record["step"], int):
            raise UsageError(f"report: {file}, line {number}: this is not a record of json_monitor")
        records.append(record)
    if not records:
        raise UsageError(f"report: {file}: it contains no steps")
    name = file.resolve().parent.name if file.name == FILE else file.stem
    return Run(name, records, _evaluations(file.resolve().parent))


def _metrics(logged: dict[str, Any]) -> dict[str, Any]:
    """The step and the numbers of an evaluation, of what a Trainer has logged at one time."""
    return {
        key: value
        for key, value in logged.items()
        if key == "step" or (key.startswith(_EVALUATION) and isinstance(value, int | float))
    }


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    """What a Trainer has logged whose output folder has `folder` in it, or is it."""
    for place in (folder, *list(folder.parents)[:3]):
        states = [*place.glob(_STATE), *place.glob(f"checkpoint-*/{_STATE}")]
        if states:
            newest = max(states, key=lambda file: file.stat().st_mtime)
            try:
                logged = json.loads(newest.read_text(encoding="utf-8"))["log_history"]
                return [_metrics(each) for each in logged]
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise UsageError(f"report: {newest}: this is no record of a Trainer") from error
    return []
