"""The examples on two ranks: what they print, that a resumed run ends like a straight one, that the
model loads.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, T5ForConditionalGeneration

from tests.processes import REPOSITORY, fork_ranks, run
from zero.checkpoint.models import consolidate


def lines(script: str, *args: object, start: Callable = fork_ranks) -> list[str]:
    """Run an example. Return the lines that rank 0 printed about its progress."""
    done = start(REPOSITORY / "examples" / script, *map(str, args), nproc=2, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        line for line in done.stdout.splitlines() if re.match("step|epoch|accuracy|resumed", line)
    ]


def numbers(line: str) -> list[float]:
    """Return the decimal numbers in a line of progress."""
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_accelerate_loop_resumes_where_it_was(tmp_path: Path) -> None:
    """The model has dropout. So the random states must be restored too."""
    # No rank has imported transformers or called `zero.hf.enable` before the example does.
    start = partial(fork_ranks, imported="zero")
    straight = lines(
        "accelerate_loop.py", "--size", 192, "--epochs", 2, "--output", tmp_path, start=start
    )
    assert len(straight) == 2 and straight[0] != straight[1].replace("epoch 2", "epoch 1")
    before = T5ForConditionalGeneration.from_pretrained(tmp_path / "model").state_dict()
    again = (
        "--size",
        192,
        "--epochs",
        2,
        "--output",
        tmp_path / "again",
        "--resume",
        tmp_path / "epoch_1",
    )
    assert lines("accelerate_loop.py", *again) == straight[1:]
    after = T5ForConditionalGeneration.from_pretrained(tmp_path / "again" / "model").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_torch_loop_resumes_where_it_was(tmp_path: Path) -> None:
    save = ("--save-every", 3, "--output", tmp_path)
    straight = lines("torch_loop.py", "--steps", 6, *save)
    assert [line.split(":")[0] for line in straight] == [
        "step 3",
        "step 6",
        "accuracy on new sequences",
    ]
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
    done = fork_ranks("-m", "zero", "run", script, *arguments, nproc=2, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", done.stdout)]
    assert len(losses) == 3 and losses[-1] < 0.5 * losses[0], losses
    model = Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert model.model.embed_tokens.weight.isfinite().all()


def zero_run(*command: object) -> list[str]:
    """Run a command under `zero run`. Return the lines that it printed about its progress."""
    zero = [sys.executable, "-m", "zero", "run", *map(str, command)]
    done = run(zero, timeout=280, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        line for line in done.stdout.splitlines() if re.match("epoch|validated|DEEPSPEED", line)
    ]


def test_accelerate_launch(tmp_path: Path) -> None:
    """The script is unchanged. The configuration is what `accelerate config` writes."""
    launch = (
        "accelerate",
        "launch",
        "--config_file",
        "examples/deepspeed_zero3.yaml",
        "--main_process_port",
        0,
    )
    said = zero_run(*launch, "examples/accelerate_launch.py", "--epochs", 2, "--output", tmp_path)
    assert [line.split(":")[0] for line in said] == [
        "DEEPSPEED on 2 processes",
        "epoch 1",
        "epoch 2",
    ]
    assert numbers(said[2])[0] < 0.5 < numbers(said[1])[0]
    assert {tuple(value.shape) for value in load_file(tmp_path / "model.safetensors").values()} == {
        *{(64, 4), (64,), (64, 64), (4, 64), (4,)}
    }


def test_peft_lora_is_as_ddp(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="an example for those who have PEFT")
    config = tmp_path / "ds.json"
    sizes = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    config.write_text(json.dumps(sizes | {"zero_optimization": {"stage": 3}}), encoding="utf-8")
    common = (
        "--num_train_epochs",
        1,
        "--logging_steps",
        8,
        "--max_steps",
        16,
        "--lr_scheduler_type",
        "constant",
    )
    ddp = (
        REPOSITORY / "examples" / "peft_lora.py",
        *map(str, common),
        "--use_cpu",
        "--output_dir",
        tmp_path / "ddp",
    )
    done = fork_ranks(*ddp, nproc=2, timeout=180, imported="transformers")
    assert done.returncode == 0, done.stdout + done.stderr
    script = ("-m", "zero", "run", REPOSITORY / "examples" / "peft_lora.py", *map(str, common))
    done = fork_ranks(
        *script, "--deepspeed", config, "--output_dir", tmp_path / "zero", nproc=2, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    adapters, losses = [], []
    for name in ("ddp", "zero"):
        state = json.loads(
            (tmp_path / name / "checkpoint-16" / "trainer_state.json").read_text(encoding="utf-8")
        )
        losses.append([entry["loss"] for entry in state["log_history"] if "loss" in entry])
        saved = tmp_path / name / "adapter_model.safetensors"
        adapters.append(load_file(saved))
        in_checkpoint = load_file(tmp_path / name / "checkpoint-16" / saved.name)
        assert in_checkpoint.keys() == adapters[-1].keys()
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and len(losses[0]) == 2
    assert adapters[0].keys() == adapters[1].keys() and all("lora_" in name for name in adapters[0])
    for name, value in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], value, atol=1e-4, rtol=0)


def test_lightning_is_as_ddp_and_resumes(tmp_path: Path) -> None:
    """Start by plain python. Lightning starts the second rank, which inherits the hook."""
    pytest.importorskip("lightning", reason="an example for those who have Lightning")
    fit = partial(zero_run, "examples/lightning_fit.py", "--epochs", 2, "--output")
    straight = fit(tmp_path / "ddp", "--strategy", "ddp")
    offloaded = fit(tmp_path / "zero", "--strategy", "deepspeed_stage_3_offload")
    for line, expected in zip(offloaded[:2], straight, strict=True):
        assert numbers(line) == pytest.approx(numbers(expected), abs=1e-5)
    validated, alone = numbers(offloaded[2])
    assert validated == pytest.approx(alone, abs=2e-6)
    resume = ("--resume", tmp_path / "zero" / "epoch=0.ckpt")
    assert fit(tmp_path / "stage 2", "--strategy", "deepspeed_stage_2", *resume) == offloaded[1:]


def test_sentence_transformers_is_as_ddp(tmp_path: Path) -> None:
    pytest.importorskip(
        "sentence_transformers", reason="an example for those who have sentence-transformers"
    )
    config = tmp_path / "ds.json"
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    config.write_text(
        json.dumps({"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"})
    )
    script = REPOSITORY / "examples" / "sentence_transformers_fit.py"
    common = ("--max_steps", "4", "--logging_steps", "1", "--report_to", "none", "--output_dir")
    ddp = fork_ranks(
        script,
        *common,
        tmp_path / "ddp",
        "--use_cpu",
        nproc=2,
        timeout=200,
        imported="transformers",
    )
    assert ddp.returncode == 0, ddp.stdout + ddp.stderr
    sharded = ("-m", "zero", "run", script, *common, tmp_path / "zero", "--deepspeed", config)
    done = fork_ranks(*sharded, nproc=2, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("ddp", "zero"))
    for name, value in wanted.items():
        torch.testing.assert_close(saved[name], value, atol=1e-5, rtol=0)


def test_three_d_goes_on_with_other_stages(tmp_path: Path) -> None:
    def run(nproc: int, *arguments: object) -> list[str]:
        common = ("--steps", "4", "--save-every", "2", "--output", tmp_path)
        script = REPOSITORY / "examples" / "three_d.py"
        done = fork_ranks(script, *common, *map(str, arguments), nproc=nproc, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"^(?:step|resumed).*$", done.stdout, re.M)

    straight = run(4, "--tensor", 2)
    (tmp_path / "latest").write_text("global_step2")
    resumed = run(2, "--tensor", 1, "--stages-per-rank", 2, "--resume")
    assert resumed[0].startswith("resumed") and len(straight) == 2
    assert numbers(resumed[1]) == pytest.approx(numbers(straight[1]), rel=1e-5)
    consolidate(tmp_path, tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_hybrid_sharding_counts_what_crosses_groups() -> None:
    done = fork_ranks(REPOSITORY / "examples" / "hybrid_sharding.py", nproc=4, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.findall(
        r"^(.+?) +loss ([\d.]+), (\d+) elements in shards, (\d+) bytes", done.stdout, re.M
    )
    (
        (_, loss, held, whole, *_),
        (_, mics_loss, mics_held, mics),
        (_, hpz_loss, hpz_held, hpz),
    ) = counts
    assert [name for name, *_ in counts] == ["stage 3", "MiCS", "hpZ"] and loss == hpz_loss
    assert float(mics_loss) == pytest.approx(float(loss), rel=1e-5)
    # Of P parameters: P by all-gathers and P/2 by gradients; P/2 by gradients; P/2 by each.
    assert int(mics) == pytest.approx(int(whole) / 3, rel=0.1)
    assert int(hpz) == pytest.approx(int(whole) * 2 / 3, rel=0.1)
    assert int(mics_held) == pytest.approx(2 * int(held), rel=0.03) and held == hpz_held, (
        "but for paddings"
    )
