"""`zero trace` of scripts on several ranks: under tensor parallelism, and where the Trainer saves
before the step that is asked for.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests import recorded
from tests.processes import REPOSITORY, fork_ranks
from zero.tools.cli import main
from zero.tools.profile import command

CUT = """
from types import SimpleNamespace
import torch, zero
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
model.config = SimpleNamespace(base_model_tp_plan={"0": "colwise", "2": "rowwise"})
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
    "tensor_parallel": {"autotp_size": 2},
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


def ranks_in(path: Path) -> set[str]:
    """The ranks of a trace in which something lasted."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    return {names[each["pid"]] for each in events if each.get("dur", 0) > 0}


def test_ranks_of_one_model_have_tracks_of_their_own(tmp_path: Path):
    script = tmp_path / "cut.py"
    script.write_text(CUT)
    words = ("trace", "--step", "2", "--out", tmp_path / "trace.json")
    words += ("torchrun", "--standalone", "--nproc_per_node", "2", script)
    others = {"nproc": 0, "timeout": 180, "imported": "zero", "cwd": REPOSITORY}
    done = fork_ranks("-m", "zero", *words, **others)
    assert done.returncode == 0, done.stderr
    assert ranks_in(tmp_path / "trace.json") == {"rank 0", "rank 1"}


def test_the_trainer_saves_nothing_and_all_ranks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """At stage 2 only rank 0 makes the checkpoint's folder, before the others call the engine."""
    run = partial(recorded.run, nproc=2, imported="transformers on zero")
    monkeypatch.setattr(command, "run", run)
    script, out = tmp_path / "saves.py", tmp_path / "trace.json"
    script.write_text(SAVES)
    for step, code in ((4, 2), (2, 0)):
        words = ("--step", str(step), "--out", str(out), str(script), str(tmp_path))
        with pytest.raises(SystemExit) as ended:
            main(["trace", *words])
        _, stderr = capsys.readouterr()
        assert ended.value.code == code, stderr
        assert (code == 2) == ("took fewer than 4 optimizer steps" in stderr)
        assert not list(tmp_path.glob("output/checkpoint-*"))
    assert ranks_in(out) == {"rank 0", "rank 1"}
