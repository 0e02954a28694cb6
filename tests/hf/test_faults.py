"""The short version of `python -m benchmarks.faults`: kills and damaged files through the real
Trainer.
"""

from __future__ import annotations

import pytest

from tests.processes import fork_ranks


@pytest.mark.timeout(600)
def test_kills_are_survived_and_damage_is_noticed():
    words = "--trials 1 --seed 11 --parts kills damage".split()
    done = fork_ranks("-m", "benchmarks.faults", *words, nproc=0, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills resumed bit for bit; 0 failed" in done.stdout
    assert done.stdout.count("; 0 failed") == 2
