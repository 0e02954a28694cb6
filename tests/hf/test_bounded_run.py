"""`zero trace` of scripts on several ranks: under tensor parallelism, and where the Trainer saves
before the step that is asked for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess

from tests.processes import REPOSITORY, run

CUT = """
import torch, zero
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
specs = [
    {"patterns": ["0.weight"], "partition_type": "column"},
    {"patterns": ["2.weight"], "partition_type": "row"},
]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": specs}},
}
engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(3):
    engine.backward(engine(torch.ones(1, 4)).square().mean())
    engine.step()
"""

SAVES = """
import sys
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x) - labels).square().mean()}

folder = sys.argv[1]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2},
}
arguments = TrainingArguments(
    output_dir=f"{folder}/output", deepspeed=config, max_steps=4, save_steps=2, use_cpu=True,
    per_device_train_batch_size=1, report_to=[], learning_rate=0.1, disable_tqdm=True,
)
rows = [{"x": torch.ones(4), "labels": torch.zeros(4)}] * 16
Trainer(Model(), arguments, train_dataset=rows).train()
"""


def trace(script: Path, step: int, *arguments: str) -> CompletedProcess:
    torchrun = ["torchrun", "--standalone", "--nproc_per_node", "2", script, *arguments]
    out = script.with_name("trace.json")
    command = [sys.executable, "-m", "zero", "trace", "--step", str(step), "--json", "--out", out]
    return run([*command, *torchrun], timeout=180, cwd=REPOSITORY)


def test_ranks_of_one_model_have_tracks_of_their_own(tmp_path: Path):
    script = tmp_path / "cut.py"
    script.write_text(CUT)
    done = trace(script, 2)
    assert done.returncode == 0, done.stderr
    seconds = json.loads(done.stdout)["seconds"]
    assert {"rank 0", "rank 1"} == set(seconds)
    assert all(tracks["phases"] > 0 for tracks in seconds.values())


def test_the_trainer_saves_nothing_and_all_ranks_end(tmp_path: Path):
    """At stage 2 only rank 0 makes the checkpoint's folder, before the others call the engine."""
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    done = trace(script, 4, str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "took fewer than 4 optimizer steps" in done.stderr
    assert not list(tmp_path.glob("output/checkpoint-*"))
    done = trace(script, 2, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["seconds"]) == {"rank 0", "rank 1"}
    assert not list(tmp_path.glob("output/checkpoint-*"))
