"""Every command of `zero` works with the declared dependencies alone, and prints nothing but its own
lines. Continuous integration runs this folder in an environment made by `pip install . pytest`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from zero.config import load_config
from zero.config.table import table

REPOSITORY = Path(__file__).parents[2]
# Packages that nobody has to install for zero, and those that take seconds to import.
OPTIONAL = "peft trl bitsandbytes torchao triton matplotlib deepspeed lightning".split()
HEAVY = ["torch", "transformers", "accelerate", "numpy", "sympy", *OPTIONAL]

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
    "json_monitor": {"enabled": True, "output_path": "records", "job_name": "run"},
}
TRAIN = """
import sys
import torch
import zero

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
for step in range(1, 4):
    torch.manual_seed(step)
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
    if "--save" in sys.argv:
        engine.save_checkpoint("output", tag=f"global_step{step}")
if "--modules" in sys.argv:
    print(*(name for name in sys.argv[2:] if name in sys.modules))
"""
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


class Done(NamedTuple):
    code: int
    out: str
    err: str


def python(folder: Path, *words: str) -> Done:
    """Run Python in `folder`, with one thread and this checkout."""
    given = {name: value for name, value in os.environ.items() if "ZERO" not in name}
    variables = given | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=250
    )
    return Done(done.returncode, done.stdout, done.stderr)


def zero(folder: Path, line: str) -> Done:
    return python(folder, "-m", "zero", *line.split())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script, what it has saved and recorded, and a model's configuration."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    (folder / "train.py").write_text(TRAIN)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    done = zero(folder, "run train.py --save")
    assert done.code == 0, done.err
    assert {line.partition(" ")[0] for line in done.err.splitlines()} <= OWN, done.err
    return folder


# The first words of the lines that a run prints at its start.
OWN = {"zero", "key", "optimizer", "all", *(row.key for row in table(load_config(CONFIG)))}


def test_commands(place: Path):
    print(python(place, "train.py", "--save").err)
    for line in [
        "doctor",
        "explain ds.json",
        "estimate model --ds-config ds.json --world 2 --seq 16",
        "estimate model --ds-config ds.json --adapter 8",
        "plan model --device-memory 1G --seq 16",
        "inspect output",
        "inspect output/global_step3",
        "inspect output --json",
        "consolidate output merged",
        "convert output/global_step3 --to dcp dcp",
        "convert output/global_step3 --to deepspeed ds",
        "convert output/global_step3 --to hf hf",
        "adopt dcp back",
        "adopt ds back2",
        "report records",
        "trace --step 2 train.py",
        "memory --step 2 train.py",
        "verify train.py",
        "launch --num_gpus 2 train.py",
        "run torchrun --nproc_per_node 2 train.py",
        "hook",
    ]:
        done = zero(place, line)
        print(f"=== {line}: {done.code}\n{done.out[:600]}\n--- {done.err[:1500]}", flush=True)
