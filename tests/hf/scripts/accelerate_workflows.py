"""accelerate's DeepSpeed plugins in an own loop. This script does not mention zero.

`python accelerate_workflows.py FOLDER`: see `workflows.py`. A student is trained under one plugin,
with two micro-batches a step, and a frozen teacher has another plugin."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from jobs import make_model
from torch.nn.functional import mse_loss
from workflows import (
    LR,
    RANKS,
    SAMPLES,
    STEPS,
    ZERO3,
    T5ForConditionalGeneration,
    assert_halved,
    close,
    differing,
    values_of,
    whole_batch,
)

AUTOMATIC = ZERO3 | {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "gradient_clipping": 1.0,
}
OF_TEACHER = ZERO3 | {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
WARMUP = [0.0, 0.0]  # WarmupLR warms up for at least two steps


def loss_of(
    student: torch.nn.Module, teacher: torch.nn.Module, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    with torch.no_grad():
        target = teacher(**batch).logits
    output = student(**batch)
    return output.loss + mse_loss(output.logits, target)


def plain(student: torch.nn.Module, teacher: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, weight_decay=0.0)
    losses = []
    for factor in [*WARMUP, *[1.0] * STEPS]:
        optimizer.param_groups[0]["lr"] = factor * LR
        loss = loss_of(student, teacher, whole_batch("t5"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    folder = Path(sys.argv[1])
    path = folder / f"teacher{os.environ['RANK']}"
    teacher = make_model("t5").eval()
    with torch.no_grad():
        teacher.lm_head.weight.mul_(3)
    teacher.save_pretrained(path)
    values, expected = values_of(teacher), plain(make_model("t5"), teacher)

    settings = {"student": AUTOMATIC, "teacher": OF_TEACHER}
    plugins = {name: DeepSpeedPlugin(hf_ds_config=each) for name, each in settings.items()}
    accelerator = Accelerator(deepspeed_plugins=plugins, gradient_accumulation_steps=2)
    samples = torch.utils.data.TensorDataset(*whole_batch("t5").values())
    loader = torch.utils.data.DataLoader(samples, batch_size=SAMPLES // RANKS // 2)
    student = make_model("t5")
    optimizer = DummyOptim(student.parameters(), lr=LR, weight_decay=0.0)
    scheduler = DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=2)
    student, optimizer, loader, scheduler = accelerator.prepare(
        student, optimizer, loader, scheduler
    )
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(T5ForConditionalGeneration.from_pretrained(path))
    teacher.eval()
    accelerator.state.select_deepspeed_plugin("student")

    losses, rates = [], []
    for _ in expected:
        total = torch.zeros(())
        for columns in loader:
            batch = dict(zip(whole_batch("t5"), columns, strict=True))
            with accelerator.accumulate(student):
                loss = loss_of(student, teacher, batch)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean") / 2
        losses.append(total.item())
        rates.append(scheduler.get_last_lr()[0])
    assert losses == close(expected) and student.global_steps == len(losses)
    assert rates == [0.0] + [LR] * 4
    assert differing(accelerator.unwrap_model(teacher), values) == []
    assert teacher.optimizer is None
    assert_halved(student)
    assert_halved(teacher)


if __name__ == "__main__":
    main()
