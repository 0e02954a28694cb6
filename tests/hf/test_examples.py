"""The examples on two ranks: what they print, that a resumed run ends as a straight one, that the model loads."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import T5ForConditionalGeneration

from tests.launch import REPOSITORY, run, torchrun


def lines(script: str, *args: object) -> list[str]:
    """What rank 0 printed about its progress, as it was printed."""
    done = torchrun(REPOSITORY / "examples" / script, *map(str, args), nproc=2, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if re.match("step|epoch|accuracy|resumed", line)]


def numbers(line: str) -> list[float]:
    """Those with a point in a line of progress."""
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_accelerate_loop_resumes_where_it_was(tmp_path: Path) -> None:
    """With dropout: the random states come back too."""
    straight = lines("accelerate_loop.py", "--size", 192, "--epochs", 2, "--output", tmp_path)
    assert len(straight) == 2 and straight[0] != straight[1].replace("epoch 2", "epoch 1")
    before = T5ForConditionalGeneration.from_pretrained(tmp_path / "model").state_dict()
    again = ("--size", 192, "--epochs", 2, "--output", tmp_path / "again", "--resume", tmp_path / "epoch_1")
    assert lines("accelerate_loop.py", *again) == straight[1:]
    after = T5ForConditionalGeneration.from_pretrained(tmp_path / "again" / "model").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_torch_loop_resumes_where_it_was(tmp_path: Path) -> None:
    save = ("--save-every", 3, "--output", tmp_path)
    straight = lines("torch_loop.py", "--steps", 6, *save)
    assert [line.split(":")[0] for line in straight] == ["step 3", "step 6", "accuracy on new sequences"]
    weights = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "latest").write_text("global_step3")
    resumed = lines("torch_loop.py", "--steps", 6, *save, "--resume")
    assert resumed[0].startswith("resumed from") and resumed[1:] == straight[1:]
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in weights.items())


def test_lightning_is_as_ddp_and_resumes(tmp_path: Path) -> None:
    """Started by plain python: Lightning starts the second rank, which inherits the hook."""
    pytest.importorskip("lightning", reason="an example for those who have Lightning")
    script = REPOSITORY / "examples" / "lightning_fit.py"

    def fit(strategy: str, *args: object) -> list[str]:
        options = ["--strategy", strategy, "--epochs", "2", *map(str, args)]
        done = run([sys.executable, "-m", "zero", "run", script, *options], timeout=280, env={"PYTHONWARNINGS": ""})
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if re.match("epoch|validated", line)]

    straight = fit("ddp", "--output", tmp_path / "ddp")
    for strategy in ("deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"):
        found = fit(strategy, "--output", tmp_path / strategy)
        for line, expected in zip(found[:2], straight, strict=True):
            assert numbers(line) == pytest.approx(numbers(expected), abs=1e-5), strategy
        validated, alone = numbers(found[2])
        assert validated == pytest.approx(alone, abs=2e-6)
    resume = tmp_path / "deepspeed_stage_3" / "epoch=0.ckpt"
    assert fit("deepspeed_stage_3", "--output", tmp_path / "again", "--resume", resume) == found[1:]
