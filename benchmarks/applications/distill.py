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

import os
import resource
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.runner import REPOSITORY, Parser, Row, finish, ranks, table
from zero.tools.arguments import count

COLUMNS = {
    "loss": "loss",
    "variant": "variant",
    "seconds": "seconds",
    "tokens/s": "speed",
    "peak MB": ("peak", 1e6),
    "of plain": "of plain",
    "value": "value",
}
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


VARIANTS = {"plain": plain, "ours": ours, "trl": trl, "liger": liger}


def peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(
    variant: str, loss: str, tokens: int, width: int, vocabulary: int, dtype: str, repeats: int
) -> Row:
    """Run one variant in this process.

    Return tokens/s by CPU (or GPU) time, peak memory in bytes, and the loss.
    """
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [(rows, times * width) for times in (1, 2) for rows in (tokens, vocabulary)]
    tensors = [
        torch.randn(*shape, device=device, dtype=getattr(torch, dtype)) / 8 for shape in shapes
    ]
    for tensor in tensors[:2]:
        tensor.requires_grad_()
    step = VARIANTS[variant](loss)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    before, seconds = peak(device), []
    for _ in range(repeats):
        start = clock()
        value = step(*tensors)
        value.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - start)
        for tensor in tensors[:2]:
            tensor.grad = None
    taken = statistics.median(seconds)
    row = {"seconds": taken, "speed": tokens / taken, "value": value.item()}
    return row | {"peak": peak(device) - before}


def rows_of(args: Namespace, task: dict[str, Any]) -> list[Row]:
    rows, base = [], 1
    paths = [str(REPOSITORY), str(args.peers or ""), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for loss, variants in LOSSES.items():
        for variant in variants:
            if variant in ("trl", "liger") and args.peers is None:
                continue
            row = ranks(measure, 1, timeout=900, env=env, variant=variant, loss=loss, **task)[0]
            base = row["peak"] if variant == "plain" else base
            rows.append({"loss": loss, "variant": variant, **row, "of plain": row["peak"] / base})
    return rows


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=count, default=512)
    add("--width", type=count, default=64, help="of the student, half of the teacher's")
    add("--vocabulary", type=count, default=151_936)
    add("--dtype", default="float32")
    add("--repeats", type=count, default=3)
    add("--peers", type=Path, help="folder with trl and liger_kernel")
    parser.add_output()
    args = parser.parse_args()
    names = ("tokens", "width", "vocabulary", "dtype", "repeats")
    rows = rows_of(args, {name: getattr(args, name) for name in names})
    caption = f"{args.tokens} tokens, vocabulary {args.vocabulary:,}, width {args.width}"
    finish(args, table(caption, COLUMNS, rows), rows=rows)


if __name__ == "__main__":
    main()
