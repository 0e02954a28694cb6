"""The short version of `python -m benchmarks.faults`: kills and damaged files through the real
Trainer.
"""

from __future__ import annotations

import sys

import pytest

from tests.processes import run


@pytest.mark.timeout(600)
def test_kills_are_survived_and_damage_is_noticed():
    command = [
        sys.executable,
        "-m",
        "benchmarks.faults",
        "--trials",
        "1",
        "--seed",
        "7",
        "--parts",
        "kills",
        "damage",
    ]
    done = run(command, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "kills resumed bit for bit; 0 failed" in done.stdout
        and done.stdout.count("; 0 failed") == 2
    )
