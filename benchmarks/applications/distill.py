"""Compares the fused, chunked head with whole logits, TRL's loss and Liger's loss: tokens/s and
peak memory of one step.

    python -m benchmarks.applications.distill
    python -m benchmarks.applications.distill --peers FOLDER
        # made by: pip install --no-deps --target FOLDER trl liger-kernel

A step starts from the hidden states of student and teacher. It computes both heads, the divergence,
and the gradients of the hidden states and the student's head. Each variant runs in its own process
with one thread. Memory is the growth of the peak RSS since before the first step; on a GPU it is
the allocator's peak."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from benchmarks.arguments import Parser, result_file
from zero.tools.arguments import count

REPOSITORY = Path(__file__).resolve().parents[2]
LOSSES = {"forward_kl": ("plain", "ours"), "jsd": ("plain", "ours", "trl", "liger")}

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(loss: str) -> Step:
    """Whole logits and autograd."""

    def step(hidden, weight, teacher_hidden, teacher_weight):
        log_q = linear(hidden, weight).float().log_softmax(-1)
        with torch.no_grad():
            log_p = linear(teacher_hidden, teacher_weight).float().log_softmax(-1)
        if loss == "forward_kl":
            return (log_p.exp() * (log_p - log_q)).sum() / len(hidden)
        log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
        of_teacher, of_student = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
        return 0.5 * (of_teacher.sum() + of_student.sum()) / len(hidden)

    return step


def ours(loss: str) -> Step:
    from distill.fused import HeadTeacher, Recipe, Targets, fused_head_loss
    from distill.losses import Divergence

    recipe = Recipe(1.0, Divergence(loss))

    def step(hidden, weight, teacher_hidden, teacher_weight):
        teacher = HeadTeacher(teacher_hidden, teacher_weight, None, hidden.device)
        labels = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        return fused_head_loss(hidden, weight, None, Targets(labels, teacher), recipe)[0] / len(
            hidden
        )

    return step


def trl(loss: str) -> Step:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.gkd import GKDTrainer

    def step(hidden, weight, teacher_hidden, teacher_weight):
        logits = linear(hidden, weight).unsqueeze(0)
        with torch.no_grad():
            teacher_logits = linear(teacher_hidden, teacher_weight).unsqueeze(0)
        labels = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        return GKDTrainer.generalized_jsd_loss(logits, teacher_logits, labels=labels, beta=0.5)

    return step


def liger(loss: str) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    module = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=False
    )

    def step(hidden, weight, teacher_hidden, teacher_weight):
        labels = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        return module(hidden, weight, teacher_hidden, teacher_weight, labels)

    return step


def measure(variant: str, loss: str, args: argparse.Namespace) -> dict[str, float]:
    """Run one variant in this process.

    Return tokens/s by CPU (or GPU) time, peak memory in bytes, and the loss.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = [
        torch.randn(*shape, device=device, dtype=getattr(torch, args.dtype)) / 8
        for shape in (
            (args.tokens, args.width), (args.vocabulary, args.width), (args.tokens, 2 * args.width),
            (args.vocabulary, 2 * args.width),
        )
    ]  # fmt: skip
    for tensor in tensors[:2]:
        tensor.requires_grad_()
    step = globals()[variant](loss)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    before = _peak(device)
    seconds = []
    for _ in range(args.repeats):
        start = clock()
        value = step(*tensors)
        value.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - start)
        for tensor in tensors[:2]:
            tensor.grad = None
    return {
        "tokens_per_second": args.tokens / statistics.median(seconds),
        "seconds": statistics.median(seconds),
        "peak": _peak(device) - before,
        "loss": value.item(),
    }


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--tokens", type=count, default=512)
    parser.add_argument(
        "--width", type=count, default=64, help="hidden size of the student, half of the teacher's"
    )
    parser.add_argument("--vocabulary", type=count, default=151_936)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--peers", type=Path, help="folder with trl and liger_kernel")
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "distill.json"
    )
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(*args.worker, args)))
        return
    results = []
    print(
        f"{args.tokens} tokens, vocabulary {args.vocabulary:,}, widths {args.width} and "
        f"{2 * args.width}\n"
    )
    print(
        f"{'loss':<11} {'variant':<7} {'seconds':>8} {'tokens/s':>9} {'peak MB':>8} "
        f"{'of plain':>8}   value"
    )
    for loss, variants in LOSSES.items():
        for variant in variants:
            if variant in ("trl", "liger") and args.peers is None:
                continue
            result = {"loss_type": loss, "variant": variant, **_run(variant, loss, args)}
            results.append(result)
            base = next(r for r in results if r["loss_type"] == loss)
            print(
                f"{loss:<11} {variant:<7} {result['seconds']:8.2f} "
                f"{result['tokens_per_second']:9.0f} "
                f"{result['peak'] / 1e6:8.0f} {result['peak'] / base['peak']:8.2f}   "
                f"{result['loss']:.6f}",
                flush=True,
            )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=2))
    print(f"\nwritten: {args.output}")


def _run(variant: str, loss: str, args: argparse.Namespace) -> dict[str, float]:
    options = [
        f"--{name}={getattr(args, name)}"
        for name in ("tokens", "width", "vocabulary", "dtype", "repeats")
    ]
    command = [
        sys.executable,
        "-m",
        "benchmarks.applications.distill",
        "--worker",
        variant,
        loss,
        *options,
    ]
    paths = [str(REPOSITORY), str(args.peers or ""), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    output = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=900
    ).stdout
    return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    main()
