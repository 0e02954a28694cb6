"""A sample of damaged files: each is an error of one line, or changes nothing."""

from __future__ import annotations

from pathlib import Path

from tests.hunt.damage import judge_all
from tests.processes import run_on


def test_a_sample_of_damaged_files(tmp_path: Path):
    (faults,) = run_on(1, judge_all, str(tmp_path), range(150), timeout=200)
    assert not faults, "\n".join(faults)
