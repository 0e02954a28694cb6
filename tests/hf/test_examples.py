"""The examples on two ranks: what they print, that a resumed run ends as a straight one, that the model loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM, T5ForConditionalGeneration

from tests.launch import REPOSITORY, torchrun
from tests.warm import warm_ranks


def lines(script: str, *args: object) -> list[str]:
    """What rank 0 printed about its progress, as it was printed."""
    done = torchrun(REPOSITORY / "examples" / script, *map(str, args), nproc=2, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if re.match("step|epoch|accuracy|resumed", line)]


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


def test_trl_sft_learns_and_saves(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    script = REPOSITORY / "examples" / "trl_sft.py"
    arguments = ("--steps", "30", "--output", tmp_path)
    done = warm_ranks("-m", "zero", "run", script, *arguments, nproc=2, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", done.stdout)]
    assert len(losses) == 3 and losses[-1] < 0.5 * losses[0], losses
    model = Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert model.model.embed_tokens.weight.isfinite().all()
