"""Step time and memory of DDP, FSDP2, this engine's ZeRO-3 and, if its environment is given,
DeepSpeed's ZeRO-3.

    python -m benchmarks.step
    python -m benchmarks.step --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED
    python -m benchmarks.step --model llama-50m --batch 4 --length 64 \\
        --variants zero3 zero3-compiled fsdp2 fsdp2-compiled
    python -m benchmarks.step --model t5-small --batch 1 --length 64 --ranks 1 \\
        --variants plain zero0 zero3      # one rank beside plain torch

All variants train the same model (a T5 of 42M parameters) on the same batches, each in its own
processes. They take turns. A ratio to the first variant is formed within a round, and the median
over the rounds is reported. A variant whose losses differ from the first one's fails. `first step`
includes compilation."""

from __future__ import annotations

from benchmarks.runner import Parser, by_variant, finish, summary, table, take_turns
from benchmarks.step.comparison import add_options, choose, heading, run
from benchmarks.step.worker import VARIANTS

DEFAULT = ["ddp", "fsdp2", "zero3", "zero3-strict", "deepspeed3", "deepspeed3-strict"]
# Largest relative difference to the first variant's loss. In fp32 only the order of sums differs.
# In bf16 the variants round at different places, by up to 2**-8 each.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
COLUMNS = {
    "variant": "variant",
    "CPU s": "cpu",
    "/ first": "cpu ratio",
    "wall s": "seconds",
    "wall / first": "seconds ratio",
    "first step s": "first",
    "steady MB": ("steady", 1e6),
    "peak MB": ("host", 1e6),
    "loss diff": "loss diff",
}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help=f"default: {DEFAULT}")
    parser.add_argument("--dtype", choices=list(LOSS_TOLERANCE), default="fp32")
    add_options(
        parser, model="t5-42m", ranks=2, threads=1, batch=8, length=32, rounds=3, warmup=3, steps=4
    )
    args = parser.parse_args()
    choose(args, DEFAULT)
    rounds, missing = take_turns(args.variants, args.rounds, lambda name: run(name, args))
    tolerances = {"loss diff": LOSS_TOLERANCE[args.dtype]}
    base, rows = summary(rounds, args.variants, missing, tolerances, ("seconds", "cpu"))
    caption = f"{heading(args, rows[base])}; a step and process"
    finish(
        args, table(caption, COLUMNS, by_variant(rows)), missing=missing, rows=rows, rounds=rounds
    )


if __name__ == "__main__":
    main()
