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

from tests.hf import distill_runs
from tests.hf.distill_runs import LINES, log, run_jobs, save_llama, write_stage_3
from tests.processes import REPOSITORY

# More than the limits of the two processes that the fixture starts.
pytestmark = pytest.mark.timeout(600)

STEPS, BATCH = 4, 4
COMMON = distill_runs.COMMON + (
    " --model_name_or_path {}/student --teacher_model_name_or_path {}/teacher --export_dtype "
    "float32 --train_file {}/lines.jsonl --packing False --max_length 48 --learning_rate 1e-3 "
    "--lr_scheduler_type constant --save_strategy steps"
)
KINDS = {
    "files": "",
    "streamed": "--streaming True",
    "adapters": "--use_peft True",
    "sharded": "--deepspeed {}/stage3.json",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    for name, layers in (("student", 1), ("teacher", 2)):
        save_llama(folder / name, layers)
    write_stage_3(folder)
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in LINES))
    return folder


def jobs(ranks: int) -> dict[str, str]:
    """A whole run, and one that ends after half of the steps and is started again."""
    found = {}
    batch = f"--per_device_train_batch_size {BATCH // max(1, ranks)} --save_steps {STEPS // 2}"
    for kind, own in KINDS.items():
        for name, steps, output, logged in (
            ("whole", STEPS, "whole", 1),
            ("half", STEPS // 2, "again", STEPS // 2),
            ("again", STEPS, "again", 1),
        ):
            found[f"{kind} {name}"] = (
                f"{COMMON} {own} {batch} --max_steps {steps} --logging_steps {logged} "
                f"--output_dir {{}}/{kind}_{output}_{ranks}"
            )
    return found


@pytest.fixture(scope="module")
def results(folder) -> dict[int, dict[str, Any]]:
    return {ranks: run_jobs(folder, jobs(ranks), ranks)[0] for ranks in (0, 2)}


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_command_goes_on_bit_for_bit(kind, ranks, folder, results):
    for name in ("whole", "half", "again"):
        assert results[ranks][f"{kind} {name}"] == [0, ""]
    again, whole = folder / f"{kind}_again_{ranks}", folder / f"{kind}_whole_{ranks}"
    # The first half has not logged its first step, so it was not trained again.
    assert 1 in log(whole, "step") and 1 not in log(again, "step")
    (file,) = (each.name for each in whole.glob("*model.safetensors"))
    ours, expected = load_file(again / file), load_file(whole / file)
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_ranks_share_a_stream(folder, results):
    one, two = (log(folder / f"streamed_whole_{ranks}") for ranks in (0, 2))
    assert two == pytest.approx(one, rel=1e-5)


def test_sigterm_leaves_a_checkpoint(folder):
    output = folder / "preempted"
    options = f"{COMMON} --save_steps 100000 --max_steps 100000 --per_device_train_batch_size 1"
    words = [sys.executable, str(REPOSITORY / "run_distill.py"), "--output_dir", str(output)]
    words += options.replace("{}", str(folder)).split()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
