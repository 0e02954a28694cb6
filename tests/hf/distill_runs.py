"""Runs command lines of run_distill.py in their own processes, and makes models for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distill.corpus import train_tokenizer
from tests.hf.trainer_runs import AUTO, TIMEOUT
from tests.processes import REPOSITORY, fork_ranks

SCRIPTS = REPOSITORY / "tests" / "distill" / "scripts"
LINES = [f"def add_{i}(a, b):\n    return a + b + {i}\n" for i in range(40)]
TOKENIZER = train_tokenizer(LINES, 290)
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 1,
}  # fmt: skip
# What all command lines have; `{}` stands for the folder of the models and the data.
COMMON = (
    "--logging_steps 1 --report_to none --disable_tqdm True --ddp_find_unused_parameters False "
    "--do_train"
)


def save_llama(folder: Path, layers: int, **sizes: Any) -> LlamaForCausalLM:
    torch.manual_seed(layers)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES | sizes))
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return model


def write_stage_3(folder: Path) -> None:
    section = {"stage": 3, "stage3_param_persistence_threshold": 100}
    section["stage3_gather_16bit_weights_on_model_save"] = True
    (folder / "stage3.json").write_text(json.dumps({"zero_optimization": section, **AUTO}))


def run_jobs(folder: Path, jobs: dict[str, str], ranks: int) -> tuple[dict[str, Any], str]:
    """Return the exit code and the message of each command line, and what all of them printed.

    They write to a folder of their own name, unless they say another one.
    """
    lines = []
    for name, job in jobs.items():
        lines.append([word.replace("{}", str(folder)) for word in job.split()])
        if "cache_teacher" not in job and "--output_dir" not in job:
            lines[-1] += ["--output_dir", str(folder / name)]
    path = folder / f"jobs{ranks}.json"
    path.write_text(json.dumps(lines))
    process = fork_ranks(SCRIPTS / "commands.py", path, nproc=ranks, timeout=1.5 * TIMEOUT)
    assert process.returncode == 0, process.stdout + process.stderr
    results = dict(zip(jobs, json.loads(path.with_suffix(".out").read_text()), strict=True))
    return results, process.stdout


def log(folder: Path, key: str = "loss") -> list[Any]:
    """The numbers in the log of a training, or its steps."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in history if "loss" in entry]
