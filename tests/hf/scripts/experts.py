"""A mixture of experts under accelerate's launcher: by TRL's SFTTrainer, and in an own loop. This
script does not mention zero.

`accelerate launch ... experts.py CONFIG FOLDER`: the launcher's configuration divides the experts
over ranks, and CONFIG is the same one without that. Both have the same losses and norms."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin
from datasets import Dataset
from jobs import SAMPLES, Tokens, collate, make_model
from torch.distributed.tensor import DTensor
from transformers import ByT5Tokenizer
from trl import SFTConfig, SFTTrainer

COMMON = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3,
    "logging_steps": 1, "learning_rate": 1e-3, "max_grad_norm": 0.5, "save_strategy": "no",
    "report_to": [], "disable_tqdm": True, "bf16": False,
}  # fmt: skip


# The trained model, and the losses and norms.
Run = tuple[torch.nn.Module, list[list[float]]]


def by_trl(folder: Path, config: dict | None) -> Run:
    """Samples differ in length, and the router's loss is added."""
    args = SFTConfig(str(folder), deepspeed=config, **COMMON)
    data = Dataset.from_list([{"input_ids": list(range(3, 8 + i))} for i in range(SAMPLES)])
    tokenizer = ByT5Tokenizer(extra_ids=0)
    model = make_model("mixtral")
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer.model, [[entry["loss"], entry["grad_norm"]] for entry in steps]


def by_a_loop(folder: Path, config: dict | None) -> Run:
    plugin = None if config is None else DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    model: Any = make_model("mixtral")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data: Any = Tokens(SAMPLES, seq2seq=False)
    loader = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append([accelerator.reduce(loss.detach(), "mean").item()])
        if accelerator.sync_gradients:
            found[-1].append(model.get_global_grad_norm())
    return model, found


def main() -> None:
    config, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for run in (by_trl, by_a_loop):
        runs = []
        for given in (None, config):
            model, steps = run(folder, given)
            divided = sum(isinstance(param, DTensor) for param in model.parameters())
            assert divided == (4 if given is None else 0), run
            runs.append(steps)
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        assert len(runs[0]) >= 3
        for found, expected in zip(*runs, strict=True):
            assert found == pytest.approx(expected, rel=1e-6), run


if __name__ == "__main__":
    main()
