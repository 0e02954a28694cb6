"""TRL's own scripts at stage 3 on two ranks, against DDP.

`python -m benchmarks.compatibility` measures all of them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.compatibility.__main__ import (
    SCRIPTS,
    Script,
    command,
    find,
    measure,
    train,
    write_inputs,
)

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize(
    ("name", "method"), [("trl/sft", "full"), ("trl/sft", "LoRA"), ("trl/grpo", "full")]
)
def test_a_script_has_the_losses_and_weights_of_ddp(data: Path, name: str, method: str) -> None:
    """Train, evaluate, save and load. GRPO generates, and has a reference model (beta 0.1)."""
    compare(data, dataclasses.replace(SCRIPTS[name], resumes=False), method)


@pytest.mark.parametrize("flag", ["--load_in_4bit", "--load_in_8bit"])
def test_sft_on_a_quantized_model_has_the_losses_and_adapters_of_ddp(data: Path, flag: str) -> None:
    pytest.importorskip("bitsandbytes")
    script = SCRIPTS["trl/sft"]
    arguments = f"{script.arguments} {flag}"
    compare(data, dataclasses.replace(script, arguments=arguments, resumes=False), "LoRA", flag)


def compare(data: Path, script: Script, method: str, flag: str = "") -> None:
    """Run the script under DDP and at stage 3."""
    file = find(script, [])
    reference = data / f"{file.stem}_{method}{flag}"
    train(command(script, file, data, method, None, reference), reference)
    out = reference.with_name(f"{reference.name}_3")
    row = measure(script, command(script, file, data, method, 3, out), out, reference)
    assert row["result"] == "equal", row
    assert row["weights"] < 1e-5, row
