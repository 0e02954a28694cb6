"""TRL's own scripts at stage 3 on two ranks, against DDP.

`python -m benchmarks.compatibility` measures all of them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.compatibility.__main__ import SCRIPTS, command, find, measure, train, write_inputs

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize(
    ("name", "method"), [("trl/sft", "full"), ("trl/sft", "LoRA"), ("trl/grpo", "full")]
)
def test_a_script_has_the_losses_and_weights_of_ddp(data: Path, name: str, method: str) -> None:
    """Train, evaluate, save and load. GRPO generates, and has a reference model (beta 0.1)."""
    script = dataclasses.replace(SCRIPTS[name], resumes=False)
    file = find(script, [])
    reference = data / f"{file.stem}_{method}"
    train(command(script, file, data, method, None, reference), reference)
    out = reference.with_name(f"{reference.name}_3")
    row = measure(script, command(script, file, data, method, 3, out), out, reference)
    assert row["result"] == "equal", row
    assert row["weights"] < 1e-5, row
