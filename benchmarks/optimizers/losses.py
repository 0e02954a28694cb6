"""Losses of optimizers over 200 steps: two ranks at stage 3 compared with plain torch in one
process.

    python -m benchmarks.optimizers.losses

A small Llama learns the bytes of this project's documentation. All variants see the same batches of
16 x 64 bytes, in the same order. A line of the table gives the mean of the last 20 losses of both
runs, and their largest relative difference in the first 10 steps and in all steps. Rounding differs
between one process and two, and training amplifies it. The picture shows the losses of all
variants, with lines for the engine and dots for plain torch. The bf16 variants and this engine's
8-bit moments have no plain counterpart, and are compared with AdamW in fp32."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Adafactor, LlamaConfig, LlamaForCausalLM

import zero
from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, report, run_ranks
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


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--output",
        type=result_file,
        default=REPOSITORY / "benchmarks" / "out" / "optimizer_losses.json",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def build() -> nn.Module:
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))


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


def summarize(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for name, losses in ours.items():
        expected = theirs[REFERENCE.get(name, name)]
        apart = [abs(a / b - 1) for a, b in zip(losses, expected, strict=True)]
        ends = {
            "engine": statistics.mean(losses[-20:]),
            "plain torch": statistics.mean(expected[-20:]),
        }
        rows.append(
            {"optimizer": name, **ends, "first 10 steps": max(apart[:10]), "all steps": max(apart)}
        )
    return rows


def draw(ours: dict[str, list[float]], theirs: dict[str, list[float]], path: Path) -> None:
    import matplotlib  # here, so that the table can be had without it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for number, (name, losses) in enumerate(ours.items()):
        axes.plot(losses, color=f"C{number}", linewidth=1, label=name)
        if name in theirs:
            places = range(0, len(losses), 10)
            axes.plot(
                places,
                [theirs[name][place] for place in places],
                ".",
                color=f"C{number}",
                markersize=5,
            )
    axes.set(
        xlabel="step",
        ylabel="loss",
        title="Lines: two ranks at stage 3. Dots: plain torch, one process",
    )
    axes.set_ylim(top=max(losses[5] for losses in ours.values()))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    print(f"picture: {path}")


def main() -> None:
    args = parse_arguments()
    if args.worker:
        dist.init_process_group("gloo")
        report({name: sharded(name, args.steps) for name in installed(args.variants)})
        dist.destroy_process_group()
        return
    command = [
        "-m",
        "benchmarks.optimizers.losses",
        "--worker",
        "--steps",
        str(args.steps),
        "--variants",
        *args.variants,
    ]
    ours = run_ranks(sys.executable, command, RANKS, timeout=3600)[0]
    theirs = {
        name: plain(name, args.steps) for name in {REFERENCE.get(name, name): None for name in ours}
    }
    rows = summarize(ours, theirs)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(
        json.dumps({"rows": rows, "engine": ours, "plain torch": theirs}, indent=1) + "\n"
    )
    print(
        "| optimizer | engine, last 20 losses | plain torch | apart, first 10 steps | apart, all "
        "steps |"
    )
    print("|---|---|---|---|---|")
    for row in rows:
        ends = f"{row['engine']:.4f} | {row['plain torch']:.4f}"
        print(
            f"| {row['optimizer']} | {ends} | {row['first 10 steps']:.1e} | {row['all steps']:.1e} "
            "|"
        )
    draw(ours, theirs, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
