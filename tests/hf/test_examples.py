"""The examples on two ranks: what they print, that a resumed run ends like a straight one, that the
model loads.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, T5ForConditionalGeneration

from tests.processes import REPOSITORY, fork_ranks, run
from zero.checkpoint.models import consolidate

EXAMPLES = REPOSITORY / "examples"
RUN = ("-m", "zero", "run")


def on_ranks(*words: object, nproc: int = 2, **options: Any) -> str:
    """Run a script on forked ranks. Return what it printed."""
    done = fork_ranks(*map(str, words), nproc=nproc, timeout=200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(script: str, *args: object, **options: Any) -> list[str]:
    """Run an example. Return the lines that rank 0 printed about its progress."""
    said = on_ranks(EXAMPLES / script, *args, **options)
    return [line for line in said.splitlines() if re.match("step|epoch|accuracy|resumed", line)]


def numbers(line: str) -> list[float]:
    """Return the decimal numbers in a line of progress."""
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_accelerate_loop_resumes_where_it_was(tmp_path: Path) -> None:
    """The model has dropout. So the random states must be restored too."""
    sizes = ("--size", 192, "--epochs", 2, "--output")
    # No rank has imported transformers or called `zero.hf.enable` before the example does.
    straight = lines("accelerate_loop.py", *sizes, tmp_path, imported="zero")
    assert len(straight) == 2 and straight[0] != straight[1].replace("epoch 2", "epoch 1")
    before = T5ForConditionalGeneration.from_pretrained(tmp_path / "model").state_dict()
    again = (*sizes, tmp_path / "again", "--resume", tmp_path / "epoch_1")
    assert lines("accelerate_loop.py", *again) == straight[1:]
    after = T5ForConditionalGeneration.from_pretrained(tmp_path / "again" / "model").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_torch_loop_resumes_where_it_was(tmp_path: Path) -> None:
    save = ("--save-every", 3, "--output", tmp_path)
    straight = lines("torch_loop.py", "--steps", 6, *save)
    steps = ["step 3", "step 6", "accuracy on new sequences"]
    assert [line.split(":")[0] for line in straight] == steps
    weights = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "latest").write_text("global_step3")
    resumed = lines("torch_loop.py", "--steps", 6, *save, "--resume")
    assert resumed[0].startswith("resumed from") and resumed[1:] == straight[1:]
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in weights.items())


def test_trl_sft_learns_and_saves(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    said = on_ranks(*RUN, EXAMPLES / "trl_sft.py", "--steps", 30, "--output", tmp_path)
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", said)]
    assert len(losses) == 3 and losses[-1] < 0.5 * losses[0], losses
    model = Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert model.model.embed_tokens.weight.isfinite().all()


def test_accelerate_launch(tmp_path: Path) -> None:
    """The script is unchanged. The configuration is what `accelerate config` writes."""
    launch = "accelerate launch --config_file examples/deepspeed_zero3.yaml --main_process_port 0"
    script = ("examples/accelerate_launch.py", "--epochs", "2", "--output", tmp_path)
    command = [sys.executable, "-m", "zero", "run", *launch.split(), *script]
    done = run(command, timeout=280, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if re.match("epoch|DEEPSPEED", line)]
    found = [line.split(":")[0] for line in said]
    assert found == ["DEEPSPEED on 2 processes", "epoch 1", "epoch 2"]
    assert numbers(said[2])[0] < 0.5 < numbers(said[1])[0]
    weights = load_file(tmp_path / "model.safetensors").values()
    assert {(*value.shape,) for value in weights} == {(64, 4), (64,), (64, 64), (4, 64), (4,)}


def test_peft_lora_is_as_ddp(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="an example for those who have PEFT")
    sizes = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(sizes | {"zero_optimization": {"stage": 3}}), encoding="utf-8")
    options = "--num_train_epochs 1 --max_steps 16 --lr_scheduler_type constant --output_dir"
    script = (EXAMPLES / "peft_lora.py", *options.split())
    on_ranks(*script, tmp_path / "ddp", "--use_cpu", imported="transformers")
    on_ranks(*RUN, *script, tmp_path / "zero", "--deepspeed", config)
    file = "adapter_model.safetensors"
    expected, found = (load_file(tmp_path / name / file) for name in ("ddp", "zero"))
    assert expected.keys() == found.keys() and all("lora_" in name for name in found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=0)
    assert load_file(tmp_path / "zero" / "checkpoint-16" / file).keys() == found.keys()


def test_three_d_goes_on_with_other_stages(tmp_path: Path) -> None:
    common = ("three_d.py", "--steps", 4, "--save-every", 2, "--output", tmp_path)
    straight = lines(*common, "--tensor", 2, nproc=4)
    (tmp_path / "latest").write_text("global_step2")
    resumed = lines(*common, "--tensor", 1, "--stages-per-rank", 2, "--resume")
    assert resumed[0].startswith("resumed") and len(straight) == 2
    assert numbers(resumed[1]) == pytest.approx(numbers(straight[1]), rel=1e-5)
    consolidate(tmp_path, tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_hybrid_sharding_counts_what_crosses_groups() -> None:
    said = on_ranks(EXAMPLES / "hybrid_sharding.py", nproc=4)
    pattern = r"^(.+?) +loss ([\d.]+), (\d+) elements in shards, (\d+) bytes"
    counts = re.findall(pattern, said, re.M)
    (_, loss, held, whole), (_, mics_loss, mics_held, mics), (_, hpz_loss, hpz_held, hpz) = counts
    assert [name for name, *_ in counts] == ["stage 3", "MiCS", "hpZ"] and loss == hpz_loss
    assert float(mics_loss) == pytest.approx(float(loss), rel=1e-5)
    # Of P parameters: P by all-gathers and P/2 by gradients; P/2 by gradients; P/2 by each.
    assert int(mics) == pytest.approx(int(whole) / 3, rel=0.1)
    assert int(hpz) == pytest.approx(int(whole) * 2 / 3, rel=0.1)
    # But for paddings.
    assert int(mics_held) == pytest.approx(2 * int(held), rel=0.03) and held == hpz_held


@pytest.mark.timeout(1700)
def test_ray_goes_on_with_fewer_workers(tmp_path: Path) -> None:
    """Ray is not in requirements.txt, because it is large."""
    pytest.importorskip("ray", reason='Ray is not installed: pip install "ray[train]"')
    # Without them, Ray gives up on a busy machine, and reports to its makers.
    env = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "RAY_USAGE_STATS_ENABLED": "0"}
    found = []
    for name, workers, steps in (("run", 2, 4), ("run", 1, 6), ("alone", 1, 6)):
        options = f"--workers {workers} --steps {steps} --save-every 2 --output {tmp_path / name}"
        command = [sys.executable, EXAMPLES / "ray_train.py", *options.split()]
        done = run(command, timeout=540, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        pattern = rf"step (\d+): loss ([\d.]+) on {workers} workers"
        found.append(dict(re.findall(pattern, done.stdout + done.stderr)))
    first, rest, alone = ({int(n): float(loss) for n, loss in each.items()} for each in found)
    assert (list(first), list(rest), list(alone)) == ([1, 2, 3, 4], [5, 6], [1, 2, 3, 4, 5, 6])
    assert first | rest == pytest.approx(alone, rel=1e-5)
