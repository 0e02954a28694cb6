"""Measures time and memory of a training step on GPUs: DDP, FSDP2, this engine and, if given,
DeepSpeed.

    python -m benchmarks.gpu
        # Llama-3.2-1B's shape, 4 x 2048 tokens
    python -m benchmarks.gpu --model t5-3b --batch 8 --length 512 --variants zero3-offload
    python -m benchmarks.gpu --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED
    python -m benchmarks.gpu --all --deepspeed-python PATH
        # on one GPU, in 8 minutes: slices, offload, adapting, QLoRA, compilation, files, tests
    python -m benchmarks.gpu --all files tests
        # these rows of it

All variants train the same model in bf16 with fp32 masters on the same batch, each in its own
processes, one per GPU. With several rounds, they take turns. Ratios to the base are formed within a
round. The base is the first variant that finished in each round. `issued`: seconds until the host
has given all work of a step to the GPU. If it is close to the step's time, the host is the limit. A
variant fails if a loss differs from the base's by more than 2%, or the decrease from the first to
the last loss by more than 10%. A failed variant is named while the others continue, and the exit
code is then 1."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.gpu.rows import ROWS, measure
from benchmarks.models import build
from benchmarks.runner import Parser, by_variant, finish, summary, table, take_turns
from benchmarks.step.comparison import add_options, choose, heading, phases, run
from benchmarks.step.worker import VARIANTS
from zero.tools.arguments import above_zero

# bf16: the variants round at different places, by up to 2**-8 each. In a short run, losses that do
# not move are near the base's. On one H100 rounding moved losses by 0.002 of them, where they fell
# by 0.2 of them.
TOLERANCES = {"loss diff": 2e-2, "fall diff": 0.1}
DEFAULT = ["ddp", "fsdp2", "fsdp2-bf16-reduce", "zero1", "zero2", "zero3"]
DEFAULT += ["deepspeed1", "deepspeed2", "deepspeed3"]
COLUMNS = {
    "variant": "variant",
    "step s": "seconds",
    "/ base": "seconds ratio",
    "tokens/s": "tokens",
    "TFLOP/s": ("flops", 1e12),
    "issued s": "issued",
    "cpu s": "cpu",
    "GPU GB": ("device", 1e9),
    "host GB": ("host", 1e9),
    **{name: name for name in TOLERANCES},
}


def flops(name: str, batch: int, length: int) -> float:
    """Return the operations of a forward and backward pass, counted as in PaLM (appendix B),
    without recomputation.

    Six for each weight of a linear layer and token, and 12 x width x length for each attention and
    token."""
    with torch.device("meta"):
        modules = list(build(name).modules())
    weights = sum(module.weight.numel() for module in modules if isinstance(module, nn.Linear))
    widths = [m.q_proj.out_features for m in modules if hasattr(m, "q_proj")]
    widths += [m.q.out_features for m in modules if hasattr(m, "q")]
    return batch * length * (6.0 * weights + 12.0 * sum(widths) * length)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), help="default: all without offload"
    )
    add_options(
        parser, model="llama-1b", ranks=max(1, torch.cuda.device_count()), batch=4, length=2048,
        rounds=1, warmup=3, steps=10,
    )  # fmt: skip
    parser.add_argument("--all", nargs="*", choices=list(ROWS), help="all rows, or these")
    parser.add_argument("--minutes", type=above_zero, default=8.0, help="for --all")
    args = parser.parse_args()
    args.dtype = "bf16"
    if not torch.cuda.is_available():
        parser.error("no CUDA device: `python -m benchmarks.step` compares the engines on CPUs")
    args.ranks = args.ranks if args.all is None else 1
    choose(args, DEFAULT)
    if args.all is not None:
        measure({name: ROWS[name] for name in args.all or ROWS}, args)
        return
    rounds, missing = take_turns(
        args.variants, args.rounds, lambda name: run(name, args, one_batch=True)
    )
    base, rows = summary(rounds, args.variants, missing, TOLERANCES)
    for row in rows.values():
        row["flops"] = args.ranks * flops(args.model, args.batch, args.length) / row["seconds"]
        row["tokens"] = args.ranks * args.batch * args.length / row["seconds"]
    caption = f"{heading(args, rows[base])}; the base is {base}"
    tables = table(caption, COLUMNS, by_variant(rows)), phases(rows)
    finish(args, *tables, missing=missing, base=base, rows=rows, rounds=rounds)


if __name__ == "__main__":
    main()
