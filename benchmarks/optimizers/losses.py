"""Losses of optimizers over 200 steps: two ranks at stage 3 compared with plain torch in one
process.

    python -m benchmarks.optimizers.losses

A small Llama learns the bytes of this project's documentation. All variants see the same batches of
16 x 64 bytes, in the same order. A line of the table gives the mean of the last 20 losses of both
runs, and their largest relative difference in the first 10 steps and in all steps. Rounding differs
between one process and two, and training amplifies it. The picture shows the losses of all variants
on the engine and in plain torch. The bf16 variants and this engine's
8-bit moments have no plain counterpart, and are compared with AdamW in fp32."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Adafactor

import zero
from benchmarks import models
from benchmarks.models import llama
from benchmarks.runner import REPOSITORY, Parser, Table, draw, finish, ranks, relative
from zero.optim.muon import MuonWithAdamW, is_hidden_matrix
from zero.tools.arguments import count

RANKS, ROWS, LENGTH = 2, 16, 64
BF16: dict[str, Any] = {"enabled": True}
NO_MASTERS = BF16 | {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return Adafactor(model.parameters(), lr=2e-3, relative_step=False, scale_parameter=False)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    hidden, others = [], []
    for name, param in model.named_parameters():
        (hidden if is_hidden_matrix(param, name) else others).append(param)
    groups = [
        {"params": hidden, "use_muon": True, "lr": 0.01},
        {"params": others, "use_muon": False, "lr": 2e-3},
    ]
    return MuonWithAdamW(groups)


def adamw_8bit(model: nn.Module) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=2e-3)


def adamw_4bit(model: nn.Module) -> torch.optim.Optimizer:
    from torchao.optim import AdamW4bit

    return AdamW4bit(model.parameters(), lr=2e-3)


def adamw_8bit_of_bitsandbytes(model: nn.Module) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=2e-3, weight_decay=0.01)


def schedule_free(model: nn.Module) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(model.parameters(), lr=5e-3)
    optimizer.train()
    return optimizer


CODED: dict[str, Any] = {"zero_quantized_moments": True}

# Name -> (function that makes the optimizer, section bf16 of the configuration, keys of
# zero_optimization).
VARIANTS: dict[
    str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any], dict[str, Any]]
] = {
    "AdamW": (adamw, {}, {}),
    "Adafactor": (adafactor, {}, {}),
    "Muon": (muon, {}, {}),
    "AdamW, 8-bit moments (ours)": (adamw, {}, CODED),
    "AdamW, 8-bit state (torchao)": (adamw_8bit, {}, {}),
    "AdamW, 4-bit state (torchao)": (adamw_4bit, {}, {}),
    "AdamW, 8-bit state (bitsandbytes)": (adamw_8bit_of_bitsandbytes, {}, {}),
    "AdamW, schedule-free": (schedule_free, {}, {}),
    "AdamW, bf16": (adamw, BF16, {}),
    "AdamW, bf16 without masters": (adamw, NO_MASTERS, {}),
    "AdamW, bf16 without masters, 8-bit": (
        adamw,
        NO_MASTERS | {"bf16_optimizer_states": False},
        CODED,
    ),
}
# What variants without a plain run of their own are compared with.
REFERENCE = dict.fromkeys(
    (
        "AdamW, 8-bit moments (ours)",
        "AdamW, bf16",
        "AdamW, bf16 without masters",
        "AdamW, bf16 without masters, 8-bit",
    ),
    "AdamW",
)


def build() -> nn.Module:
    return models.build(llama(64, 176, 2, 4, 256))


def batches(steps: int) -> Iterator[torch.Tensor]:
    """Yield bytes of the documentation, int64, (ROWS, LENGTH)."""
    text = b"".join(path.read_bytes() for path in sorted((REPOSITORY / "docs").glob("*.md")))
    values, generator = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8),
        torch.Generator().manual_seed(3),
    )
    for _ in range(steps):
        starts = torch.randint(len(values) - LENGTH, (ROWS,), generator=generator).tolist()
        yield torch.stack([values[start : start + LENGTH] for start in starts]).long()


def plain(name: str, steps: int) -> list[float]:
    """The losses of plain torch in this process, on whole batches."""
    model, losses = build(), []
    optimizer = VARIANTS[name][0](model)
    for batch in batches(steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(name: str, steps: int) -> list[float]:
    """The losses of the engine at stage 3, the mean over ranks; each has its part of every
    batch.
    """
    make, bf16, zero_keys = VARIANTS[name]
    config = {
        "train_micro_batch_size_per_gpu": ROWS // RANKS,
        "gradient_clipping": 0.0,
        "bf16": bf16 or {"enabled": False},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero_keys},
    }
    model, losses = build(), []
    engine, *_ = zero.initialize(model=model, optimizer=make(model), config=config)
    for batch in batches(steps):
        own = batch.chunk(RANKS)[engine.comm.rank]
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()
        losses.append(engine.comm.all_reduce(loss.detach().float().clone()).item() / RANKS)
    engine.destroy()
    return losses


def installed(names: Sequence[str]) -> list[str]:
    """The variants whose packages are installed."""
    found = []
    for name in names:
        try:
            VARIANTS[name][0](nn.Linear(2, 2))
        except ImportError as error:
            print(f"left out: {name} ({error})", file=sys.stderr)
            continue
        found.append(name)
    return found


def rank(variants: list[str], steps: int) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    return {name: sharded(name, steps) for name in installed(variants)}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_output()
    args = parser.parse_args()
    task = {"variants": args.variants, "steps": args.steps}
    ours = ranks(rank, RANKS, timeout=3600, **task)[0]
    names = dict.fromkeys(REFERENCE.get(name, name) for name in ours)
    theirs = {name: plain(name, args.steps) for name in names}
    rows = []
    for name, losses in ours.items():
        expected = theirs[REFERENCE.get(name, name)]
        ends = [statistics.mean(each[-20:]) for each in (losses, expected)]
        apart = [relative(losses[:last], expected[:last]) for last in (10, args.steps)]
        rows.append([name, *ends, *apart])
    columns = ["optimizer", "engine, last 20 losses", "plain torch", "apart, first 10 steps", "all"]
    lines = {name: (range(args.steps), losses) for name, losses in ours.items()}
    lines |= {f"{name}, plain": (range(args.steps), losses) for name, losses in theirs.items()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    title = "Two ranks at stage 3, and plain torch in one process"
    draw(args.output.with_suffix(".png"), title, ("step", "loss"), lines)
    finish(args, Table(title, columns, rows), engine=ours, plain=theirs)


if __name__ == "__main__":
    main()
