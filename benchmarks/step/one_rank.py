"""One rank beside plain torch: what the engine adds to a step in which the update is what counts.

    python -m benchmarks.step.one_rank
    python -m benchmarks.step.one_rank --variants stage3 stage3-offload --dtype bf16

Trains a T5 of t5-small's shape (60.5M parameters) on single sentences, clips to a global norm of
1.0 and uses AdamW: plain torch the fused one, as transformers' Trainer does by default, and the
engine the one of its configuration. In bf16 plain torch uses autocast over fp32 weights.

Each variant is a process of its own, and all take turns, one step each. So a busy machine disturbs
all of them equally. A ratio to plain torch is formed within a round, and the median over the rounds
is reported. The run fails if losses differ from plain torch's."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY
from benchmarks.models import T5_SMALL, build_t5, synthetic_batches
from zero.tools.arguments import count

LEARNING_RATE, CLIP = 1e-4, 1.0
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ENGINE = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "stage3-offload": {"stage": 3, **OFFLOAD},
}
# Largest relative difference to plain torch's loss. In the first steps of Adam, last bits of small
# gradients decide the direction of an update. In bf16 the two round at different places, by up to
# 2**-8 each.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}

TrainStep = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--variants", nargs="+", choices=ENGINE, default=["stage0", "stage3"])
    parser.add_argument("--dtype", choices=list(LOSS_TOLERANCE), default="fp32")
    parser.add_argument("--batch", type=count, default=1, help="sentences")
    parser.add_argument("--length", type=count, default=64, help="tokens of a source, of a target")
    parser.add_argument("--threads", type=count, default=os.cpu_count())
    parser.add_argument("--warmup", type=count, default=3, help="rounds that do not count")
    parser.add_argument("--rounds", type=count, default=15)
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "one_rank.json"
    )
    parser.add_argument("--worker", choices=["plain", *ENGINE], help=argparse.SUPPRESS)
    return parser.parse_args()


def plain(model: nn.Module, args: argparse.Namespace) -> TrainStep:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )

    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def by_engine(model: nn.Module, args: argparse.Namespace) -> TrainStep:
    import zero

    logging.getLogger("zero").setLevel(logging.WARNING)
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": CLIP,
        "zero_optimization": ENGINE[args.worker],
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
    }
    engine, *_ = zero.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )

    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return train_step


def work(args: argparse.Namespace) -> None:
    """Take a step for each line on standard input, and answer with its wall and CPU seconds (of all
    threads) and its loss.
    """
    torch.set_num_threads(args.threads)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        model = build_t5(T5_SMALL, seed=1)
        train_step = (plain if args.worker == "plain" else by_engine)(model, args)
        batches = synthetic_batches(
            T5_SMALL["vocab_size"], args.batch, args.length, args.length, seed=0
        )
        print(sum(param.numel() for param in model.parameters()), file=answers, flush=True)
        for _, batch in zip(sys.stdin, batches, strict=False):
            wall, cpu = time.perf_counter(), time.process_time()
            loss = train_step(batch).item()
            seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            print(json.dumps(seconds | {"loss": loss}), file=answers, flush=True)


@contextlib.contextmanager
def worker(variant: str, args: argparse.Namespace):
    """Start the process of a variant. It ends with the context."""
    command = [sys.executable, "-m", "benchmarks.step.one_rank", "--worker", variant]
    for name in ("dtype", "batch", "length", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()


def answer(process: subprocess.Popen) -> dict[str, float]:
    line = process.stdout.readline()
    if not line:
        sys.exit("error: a worker has ended; its messages are above")
    return json.loads(line)


def measure(args: argparse.Namespace) -> tuple[int, list[dict[str, dict[str, float]]]]:
    """Return the number of parameters, and for each counted round each variant's step."""
    rounds = []
    with contextlib.ExitStack() as stack:
        places = {
            name: stack.enter_context(worker(name, args)) for name in ["plain", *args.variants]
        }
        parameters, *_ = [answer(process) for process in places.values()]
        for number in range(args.warmup + args.rounds):
            found = {}
            for name, process in places.items():
                print("step", file=process.stdin, flush=True)
                found[name] = answer(process)
            expected = found["plain"]["loss"]
            for name, step in found.items():
                difference = abs(step["loss"] - expected) / abs(expected)
                if difference > LOSS_TOLERANCE[args.dtype]:
                    sys.exit(f"error: {name}'s loss differs from plain torch's by {difference:.1e}")
            if number >= args.warmup:
                rounds.append(found)
    return parameters, rounds


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(args)
        return
    parameters, rounds = measure(args)
    rows = {}
    for name in rounds[0]:
        rows[name] = row = {}
        for key in ("wall", "cpu"):
            row[key] = statistics.median(found[name][key] for found in rounds)
            ratios = [found[name][key] / found["plain"][key] for found in rounds]
            row[f"{key}_ratio"] = statistics.median(ratios)
    print(
        f"T5 of {parameters / 1e6:.1f}M parameters, {args.dtype}, {args.batch} sentence(s) of "
        f"{args.length} + {args.length} tokens, {args.threads} thread(s); medians of {args.rounds} "
        f"rounds; load {os.getloadavg()[0]:.1f}\n"
    )
    print(f"{'variant':<16}  wall ms   cpu ms  wall/plain  cpu/plain")
    for name, row in rows.items():
        print(
            f"{name:<16} {row['wall'] * 1e3:8.1f} {row['cpu'] * 1e3:8.1f} "
            f"{row['wall_ratio']:11.2f} {row['cpu_ratio']:10.2f}"
        )
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    result = {"settings": settings, "versions": versions, "parameters": parameters}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result | {"rows": rows, "rounds": rounds}, indent=2))
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
