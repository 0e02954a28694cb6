"""accelerate's ParallelismConfig with DeepSpeed: replicas of sharded models, beside plain torch. No
word of zero.

`python hybrid.py FOLDER`: rank 0 writes what was seen to FOLDER/report.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
from torch import nn

STEPS, WIDTH, ROWS = 3, 16, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH))


def batches(ranks: int) -> torch.Tensor:
    return torch.randn(STEPS, ranks, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def main() -> None:
    parallel = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG), parallelism_config=parallel
    )
    model = make_model()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    rank, ranks = accelerator.process_index, accelerator.num_processes
    held = sum(param.ds_tensor.numel() for param in model.parameters())
    losses = []
    for batch in batches(ranks):
        loss = (model(batch[rank]) - batch[rank]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())

    plain = make_model()
    optimizer, expected = optimizer_of(plain), []
    for batch in batches(ranks):
        loss = (plain(batch) - batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    if accelerator.is_main_process:
        share = held / sum(param.numel() for param in plain.parameters())
        report = {"losses": losses, "expected": expected, "held": share}
        Path(sys.argv[1], "report.json").write_text(json.dumps(report), encoding="utf-8")


main()
