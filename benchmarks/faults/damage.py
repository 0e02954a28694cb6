"""Flips, cuts and removes every file of a checkpoint before a Trainer resumes.

See `benchmarks.faults`.
"""

from __future__ import annotations

import os
import random
import shutil
from itertools import product
from pathlib import Path

from benchmarks.faults.__main__ import Report
from benchmarks.faults.trainer import EVERY, STEPS, Ended, Job, same
from benchmarks.faults.trainer import run as run_trainer

RANKS = 2
NEWEST = STEPS - EVERY


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(max(1, path.stat().st_size)))


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def run(trials: int, chance: random.Random, folder: Path) -> Report:
    """Damage each file in each way; resume by flag, by `find_resumable` and by path.

    At most 0.3 x `trials` cases.
    """
    report, template = Report(), Job(folder / "template", RANKS, "sync", "flag", None)
    expected = run_trainer(template)
    if expected.report is None:
        raise RuntimeError(f"the run without damage failed:\n{expected.text}")
    shutil.rmtree(template.output / f"checkpoint-{STEPS}")  # so that steps are left to train
    newest = template.output / f"checkpoint-{NEWEST}"
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    cases = list(product(files, (flip, cut, remove), ("flag", "find_resumable", "path")))
    chance.shuffle(cases)
    for number, (file, damage, by) in enumerate(cases[: max(2, trials * 3 // 10)]):
        job = Job(folder / str(number), RANKS, "sync", by, None)
        shutil.copytree(template.output, job.output)
        damage(job.output / newest.name / file, chance)
        outcome = _outcome(run_trainer(job), expected.report, file)
        case = f"{file}, {damage.__name__}, {by}"
        if outcome is None:
            report.failures.append(f"{case}: {(job.folder / 'log').read_text()[-2000:]}")
        else:
            report.outcomes[outcome] += 1
            print(f"  {case}: {outcome}", flush=True)
        shutil.rmtree(job.folder)
    return report


def _outcome(ended: Ended, expected: dict, file: Path) -> str | None:
    """Return the outcome.

    None is a failure: other numbers, or an error that does not name the file.
    """
    if ended.report is None:
        return "refused by name" if file.name in ended.text else None
    if not same(ended.report, expected):
        return None
    return "without effect" if ended.report["from"] == NEWEST else "passed over"
