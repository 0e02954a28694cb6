"""A sample of odd models is saved with the names and values of plain torch, in each way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hunt.saves import MAKERS, REFUSED, judge
from tests.processes import run_on


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sample_of_what_is_saved(world_size: int, tmp_path: Path):
    names = list(MAKERS)
    others = [(name, number % 3) for number, name in enumerate(names)]
    tasks = others if world_size == 1 else [(name, 3) for name in names]
    verdicts = run_on(world_size, judge, str(tmp_path), tasks, timeout=200)[0]
    different = [what for _, what in verdicts if what]
    assert not different, "\n".join(different)
    refused = {task: why for task, (why, _) in zip(tasks, verdicts, strict=True) if why}
    assert refused.keys() == REFUSED & {*tasks}, refused
