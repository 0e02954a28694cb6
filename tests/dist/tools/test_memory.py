"""`zero memory`: what is held in a step, by kind, in bytes that are known beforehand; and its
picture.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import zero
from tests.processes import REPOSITORY, run_on
from zero.tools.cli import main
from zero.tools.profile import memory
from zero.tools.profile.memory import MemoryRun
from zero.tools.profile.picture import draw, peaks

RANKS, STEPS, LAYERS, WIDTH, ROWS = 2, 3, 3, 256, 64
# A layer's weight and bias in fp32, and one of its outputs.
LAYER, OUTPUT = 4 * (WIDTH * WIDTH + WIDTH), 4 * ROWS * WIDTH
# Padding of groups, and numbers such as losses and counters.
SMALL = 4096


class Sampled(MemoryRun):
    def _end(self, *_: object, **__: object) -> None:
        """The process goes on, so that the test gets a result."""


def train(rank: int, world_size: int, folder: Path) -> None:
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(LAYERS)
    ]
    model = torch.nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    }  # fmt: skip
    engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    Sampled(engine, folder, STEPS)
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(ROWS, WIDTH, device=engine.comm.device)).sum())
        engine.step()


def test_the_bytes_of_each_kind(tmp_path: Path):
    run_on(RANKS, train, tmp_path)
    for rank in range(RANKS):
        samples = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert [each["seconds"] for each in samples] == sorted(each["seconds"] for each in samples)
        assert {each["phase"] for each in samples} == {"forward", "backward", "step", "other"}
        held = [each["bytes"]["host"] for each in samples]
        own = LAYERS * LAYER // RANKS
        for kinds in held:
            assert own <= kinds["parameters"] <= own + SMALL
            assert 2 * own <= kinds["optimizer"] <= 2 * own + 2 * SMALL + LAYER
        gathered = [kinds.get("gathered parameters", 0) for kinds in held]
        assert LAYER <= max(gathered) <= LAYER + SMALL and gathered[-1] == 0  # one group at a time
        # Autograd keeps the input of each layer and the output of each ReLU, which is the input of
        # the next layer.
        kept = [kinds.get("activations", 0) for kinds in held]
        ends = (
            next(number for number, each in enumerate(samples) if each["phase"] == "backward") - 1
        )
        assert (LAYERS + 1) * OUTPUT <= kept[ends] <= (LAYERS + 1) * OUTPUT + SMALL
        assert kept[0] <= SMALL and kept[-1] <= OUTPUT + SMALL
        highest = peaks(samples)["host"]
        assert highest["gradients"] >= own
        assert highest["all"] == max(sum(kinds.values()) for kinds in held)
    for name in ("picture.png", "picture.svg"):
        draw(samples, "a title", tmp_path / name)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "picture.svg").read_text()
    assert all(each in text for each in ("forward", "backward", "activations, at most"))


def with_history(rank: int, world_size: int, folder: Path) -> list[str]:
    """As on a GPU. Return the calls of torch's own recorder, in order."""
    calls: list[str] = []

    def dump(file: str) -> None:
        calls.append("dump")
        Path(file).write_text("allocations")

    def record(enabled: str | None = "all") -> None:
        calls.append(f"record {enabled}")

    recorder = mock.patch.multiple(
        torch.cuda.memory, _record_memory_history=record, _dump_snapshot=dump
    )
    with mock.patch.object(memory, "_has_history", lambda device: True), recorder:
        train(rank, world_size, folder)
    return calls


def test_a_gpu_has_a_record_of_each_allocation(tmp_path: Path):
    assert run_on(1, with_history, tmp_path) == [["record all", "dump", "record None"]]
    assert (tmp_path / "rank0.pickle").read_text() == "allocations"


def test_a_device_has_a_panel_of_its_own(tmp_path: Path):
    bytes_of = {"device": {"parameters": 2 << 20}, "host": {"optimizer": 1 << 20}}
    samples = [{"seconds": n / 10, "phase": "step", "bytes": bytes_of} for n in (0, 1)]
    draw(samples, "a title", tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert "device: 2 MiB at most" in text and "host: 1 MiB at most" in text


SCRIPT = """
import torch, zero
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
"""


def test_the_command(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    script, out = tmp_path / "script.py", tmp_path / "memory.svg"
    script.write_text(SCRIPT)
    with pytest.raises(SystemExit) as ended:
        main(["memory", "--step", "1", "--out", str(out), str(script)])
    assert ended.value.code == 0 and "<svg" in out.read_text()
    assert re.search(r"rank0, host: .*parameters \d+ B", capsys.readouterr().out)
    with pytest.raises(SystemExit) as ended:
        main(["memory", "--out", str(tmp_path / "memory.doc"), str(script)])
    assert ended.value.code == 2
    assert "must end in .png or .svg or .pdf" in capsys.readouterr().err
