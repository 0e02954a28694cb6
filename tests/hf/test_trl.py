"""TRL's own scripts at stage 3 on two ranks, against DDP.

`python -m benchmarks.compatibility` measures all of them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

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
    row = compare(data, dataclasses.replace(SCRIPTS[name], resumes=False), method)
    assert row["result"] == "equal", row
    assert row["weights"] < 1e-5, row


@pytest.mark.parametrize("flag", ["--load_in_4bit", "--load_in_8bit"])
def test_sft_on_a_quantized_model_has_the_losses_and_adapters_of_ddp(data: Path, flag: str) -> None:
    pytest.importorskip("bitsandbytes")
    script = SCRIPTS["trl/sft"]
    # In evaluation, bitsandbytes repacks 4-bit weights for some CPUs, and fails on rows of fewer
    # than 64 elements.
    arguments = f"{script.arguments} {flag} --eval_strategy no"
    script = dataclasses.replace(script, arguments=arguments, resumes=False)
    row = compare(data, script, "LoRA", flag)
    # TRL makes these adapters bf16. AdamW rounds them after each step under DDP; here they have
    # fp32 masters.
    assert row["loss"] < 1e-4, row
    assert row["weights"] <= torch.finfo(torch.bfloat16).eps / 4, row


def compare(data: Path, script: Script, method: str, flag: str = "") -> dict[str, Any]:
    """Run the script under DDP and at stage 3, and return the differences."""
    file = find(script, [])
    reference = data / f"{file.stem}_{method}{flag}"
    train(command(script, file, data, method, None, reference), reference)
    out = reference.with_name(f"{reference.name}_3")
    return measure(script, command(script, file, data, method, 3, out), out, reference)
