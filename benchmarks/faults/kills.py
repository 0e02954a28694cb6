"""Kills real Trainer runs at random file operations. See `benchmarks.faults`."""

from __future__ import annotations

import random
import shutil
from itertools import product
from pathlib import Path

from benchmarks.faults.__main__ import Report
from benchmarks.faults.trainer import EVERY, Job, Kill, same
from benchmarks.faults.trainer import run as run_trainer

# Kills in one folder. Then the run may finish.
MOST_KILLS = 3
KINDS = list(product((1, 2), ("sync", "async", "nvme"), ("flag", "find_resumable"), (None, 2)))


def run_kinds(trials: int, chance: random.Random, folder: Path, kinds: list[tuple]) -> Report:
    report, references, number = Report(), {}, 0
    while sum(report.outcomes.values()) < trials:
        ranks, mode, by, limit = kinds[number % len(kinds)]
        if ranks not in references:  # one reference serves all modes and all ways to resume
            references[ranks] = run_trainer(
                Job(folder / f"reference{ranks}", ranks, "sync", by, None)
            )
            if references[ranks].report is None:
                raise RuntimeError(f"the run without a kill failed:\n{references[ranks].text}")
        job = Job(folder / str(number), ranks, mode, by, limit)
        kills = _kill_until_the_end(job, chance, references[ranks].report, report)
        report.outcomes["kills resumed bit for bit"] += kills
        print(f"  {job.ranks} ranks, {mode}, {by}, limit {limit}: {kills} kills", flush=True)
        shutil.rmtree(job.folder)
        number += 1
    return report


def run(trials: int, chance: random.Random, folder: Path) -> Report:
    kinds = list(KINDS)
    chance.shuffle(kinds)
    return run_kinds(trials, chance, folder, kinds)


def _kill_until_the_end(job: Job, chance: random.Random, expected: dict, report: Report) -> int:
    """Kill runs in one folder, then compare the one that finishes.

    Return the number of survived kills.
    """
    kills, told = 0, []
    for attempt in range(MOST_KILLS + 1):
        kill = None
        if attempt < MOST_KILLS:
            rank = chance.randrange(job.ranks)
            delay = chance.choice((0.0, 0.0, chance.uniform(0, 0.02)))
            kill = Kill(rank, chance.randint(1, expected["operations"][rank]), delay)
        bound = _complete(job)
        ended = run_trainer(job, kill, linger=chance.choice((0.0, 0.1)))
        told.append(f"{kill}")
        if ended.report is not None:
            break
        if not ended.killed:
            report.failures.append(f"{job}: {told}: did not come to its end:\n{ended.text[-3000:]}")
            return 0
        kills += 1
    if not same(ended.report, expected):
        report.failures.append(f"{job}: {told}: other numbers: {ended.report}")
        return 0
    if ended.report["from"] < bound:
        report.failures.append(
            f"{job}: {told}: resumed from {ended.report['from']}, {bound} was complete"
        )
        return 0
    return kills


def _complete(job: Job) -> int:
    """Return the step of the newest checkpoint that must be complete, because all ranks have
    finished its save.
    """
    paths = [job.folder / f"saved-{rank}" for rank in range(job.ranks)]
    step = min((int(path.read_text() or 0) if path.exists() else 0 for path in paths), default=0)
    return max(0, step - EVERY) if job.mode == "async" else step
