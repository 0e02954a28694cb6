"""run_distill.py goes on where it was interrupted, if the same command is started again: with
examples in files and with streaming, after its last checkpoint and after SIGTERM.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from distill.corpus import train_tokenizer
from tests.processes import REPOSITORY, fork_ranks

# More than the limits of the two processes that the fixture starts.
pytestmark = pytest.mark.timeout(600)

COMMANDS = REPOSITORY / "tests" / "distill" / "scripts" / "commands.py"
LINES = [f"def add_{i}(a, b):\n    return a + b + {i}\n" for i in range(60)]
STEPS, BATCH = 4, 4
COMMON = [
    "--model_name_or_path", "{}/student", "--teacher_model_name_or_path", "{}/teacher",
    "--train_file", "{}/lines.jsonl", "--packing", "False", "--max_length", "48",
    "--logging_steps", "1", "--learning_rate", "1e-3", "--lr_scheduler_type", "constant",
    "--save_strategy", "steps", "--report_to", "none", "--disable_tqdm", "True", "--do_train",
    "--ddp_find_unused_parameters", "False", "--export_dtype", "float32",
]  # fmt: skip
KINDS = {"files": [], "streamed": ["--streaming", "True"], "adapters": ["--use_peft", "True"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    tokenizer = train_tokenizer(LINES, 290)
    tokens: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    for name, layers in (("student", 1), ("teacher", 2)):
        torch.manual_seed(layers)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48,
            num_hidden_layers=layers, num_attention_heads=4, initializer_range=0.3, **tokens,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in LINES))
    return folder


def jobs(ranks: int) -> dict[str, list[str]]:
    """A whole run, and one that ends after half of the steps and is started again."""
    found = {}
    batch = ["--per_device_train_batch_size", str(BATCH // max(1, ranks))]
    for kind, own in KINDS.items():
        for name, steps, output, logged in (
            ("whole", STEPS, "whole", 1),
            ("half", STEPS // 2, "again", STEPS // 2),
            ("again", STEPS, "again", 1),
        ):
            found[f"{kind} {name}"] = [
                *COMMON, *own, *batch, "--max_steps", str(steps), "--save_steps", str(STEPS // 2),
                "--output_dir", f"{{}}/{kind}_{output}_{ranks}", "--logging_steps", str(logged),
            ]  # fmt: skip
    return found


@pytest.fixture(scope="module")
def results(folder) -> dict[int, dict[str, Any]]:
    results = {}
    for ranks in (0, 2):
        path, own = folder / f"jobs{ranks}.json", jobs(ranks)
        path.write_text(json.dumps([[word.format(folder) for word in job] for job in own.values()]))
        process = fork_ranks(COMMANDS, path, nproc=ranks, timeout=240)
        assert process.returncode == 0, process.stdout + process.stderr
        found = json.loads(path.with_suffix(".out").read_text())
        results[ranks] = dict(zip(own, found, strict=True))
    return results


def losses(folder: Path) -> dict[int, float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_command_goes_on_bit_for_bit(kind, ranks, folder, results):
    for name in ("whole", "half", "again"):
        assert results[ranks][f"{kind} {name}"] == [0, ""]
    again, whole = folder / f"{kind}_again_{ranks}", folder / f"{kind}_whole_{ranks}"
    # The first half has not logged its first step, so it was not trained again.
    assert 1 in losses(whole) and 1 not in losses(again)
    (file,) = (each.name for each in whole.glob("*model.safetensors"))
    ours, expected = load_file(again / file), load_file(whole / file)
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_ranks_share_a_stream(folder, results):
    one, two = (losses(folder / f"streamed_whole_{ranks}") for ranks in (0, 2))
    assert two == pytest.approx(one, rel=1e-5)


def test_sigterm_leaves_a_checkpoint_from_which_the_command_goes_on(folder):
    output = folder / "preempted"
    words = [word.format(folder) for word in COMMON]
    command = [
        sys.executable, str(REPOSITORY / "run_distill.py"), *words, "--save_steps", "100000",
        "--per_device_train_batch_size", "1", "--output_dir", str(output), "--max_steps",
    ]  # fmt: skip
    process = subprocess.Popen(
        [*command, "100000"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        said = ""
        while process.stdout and "'loss'" not in said:
            line = process.stdout.readline()
            said += line
            assert line, said
        process.send_signal(signal.SIGTERM)
        said += process.communicate(timeout=120)[0]
    assert process.returncode == 128 + signal.SIGTERM, said
    (checkpoint,) = output.glob("checkpoint-*")
    assert f"SIGTERM: stopped after step {checkpoint.name.rpartition('-')[2]};" in said, said
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    state = checkpoint / "trainer_state.json"
    history = json.loads(state.read_text())
    history["log_history"][0]["loss"] = 7.5
    state.write_text(json.dumps(history))
    done = subprocess.run([*command, str(step + 2)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    after = losses(output)
    assert after[1] == 7.5 and list(after) == list(range(1, step + 3))
