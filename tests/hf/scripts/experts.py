"""A mixture of experts under accelerate's launcher, by TRL's SFTTrainer. This script does not
mention zero.

`accelerate launch ... experts.py CONFIG FOLDER`: the launcher's configuration divides the experts
over ranks, and CONFIG is the same one without that. Both have the same losses and norms."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from jobs import SAMPLES, make_model
from torch.distributed.tensor import DTensor
from transformers import ByT5Tokenizer
from trl import SFTConfig, SFTTrainer

COMMON = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3,
    "logging_steps": 1, "learning_rate": 1e-3, "max_grad_norm": 0.5, "save_strategy": "no",
    "report_to": [], "disable_tqdm": True, "bf16": False,
}  # fmt: skip


def by_trl(folder: Path, config: dict | None) -> tuple[torch.nn.Module, list[list[float]]]:
    """The trained model, and the losses and norms. Samples differ in length, and the router's loss
    is added.
    """
    args = SFTConfig(str(folder), deepspeed=config, **COMMON)
    data = Dataset.from_list([{"input_ids": list(range(3, 8 + i))} for i in range(SAMPLES)])
    tokenizer = ByT5Tokenizer(extra_ids=0)
    model = make_model("mixtral")
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer.model, [[entry["loss"], entry["grad_norm"]] for entry in steps]


def main() -> None:
    config, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    runs = []
    for given, expected in ((None, 4), (config, 0)):
        model, steps = by_trl(folder, given)
        assert sum(isinstance(param, DTensor) for param in model.parameters()) == expected
        runs.append(steps)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert len(runs[0]) == 3
    for found, expected in zip(*runs, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


if __name__ == "__main__":
    main()
