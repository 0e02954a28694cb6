"""Every configuration of the gallery trains with the Trainer, and they all compute the same."""

from __future__ import annotations

import json

import pytest
import torch

from tests.hf.trainer_runs import column, run_unmodified
from tests.processes import REPOSITORY
from tests.tolerance import rounding

CONFIGS = REPOSITORY / "configs"
GALLERY = sorted(CONFIGS.glob("zero*.json"))
STEPS = 3
# The inner lengths of two layers and the head, in forward and backward.
CLOSE = rounding(torch.float32, 600, STEPS)


def test_the_gallery_is_described():
    page = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert len(GALLERY) == 8
    assert [path.name for path in CONFIGS.glob("*.json") if f"]({path.name})" not in page] == []


def test_every_configuration_trains_and_computes_the_same(tmp_path):
    jobs = []
    for path in GALLERY:
        config = json.loads(path.read_text(encoding="utf-8"))
        for section in ("offload_param", "offload_optimizer"):
            if "nvme_path" in config["zero_optimization"].get(section, {}):
                config["zero_optimization"][section]["nvme_path"] = str(tmp_path)
        arguments = {
            "deepspeed": config, "max_steps": STEPS, "per_device_train_batch_size": 2,
            "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no",
        }  # fmt: skip
        jobs.append({"model": "llama", "arguments": arguments})
    reports = dict(zip(GALLERY, run_unmodified(jobs, tmp_path / "jobs", nproc=2), strict=True))
    expected = column(reports[CONFIGS / "zero1.json"], "loss")
    assert len(set(expected)) == STEPS
    for path, report in reports.items():
        stage = int(path.stem[len("zero")])
        assert report["config"]["zero_optimization"]["stage"] == stage
        assert report["engine"] == "DeepSpeedEngine"
        assert column(report, "loss") == pytest.approx(expected, rel=CLOSE), path.name
