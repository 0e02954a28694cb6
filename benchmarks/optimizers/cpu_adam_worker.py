"""The contestants of one environment in the benchmark of Adam on host memory, one step at a time.

`benchmarks.optimizers.cpu_adam` starts it, in this environment or in one that has DeepSpeed, with
`OMP_NUM_THREADS` threads. A line on standard input names a contestant. The answer is a line of JSON
with the seconds of its step, the mean of several if tensors are small: `wall`, and `cpu` of all
threads. Each contestant is first compared with torch's AdamW on a few numbers."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
# Every step gets this number. So bias corrections are those of a run that has just begun.
STEP = 10
GROUP = {
    "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "decoupled_weight_decay": True,
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A step of small tensors is repeated until so many parameters are updated.
LEAST = 1 << 20


@dataclass
class State:
    """Gradient (input), fp32 master and moments, a parameter of the gradient's dtype (output; None
    in fp32), and an fp32 buffer for casts.
    """

    master: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    out: torch.Tensor | None
    buffer: torch.Tensor
    coded: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def random(cls, numel: int, dtype: torch.dtype) -> State:
        generator = torch.Generator().manual_seed(1)
        master, grad, exp_avg = (torch.randn(numel, generator=generator) for _ in range(3))
        exp_avg_sq = torch.rand(numel, generator=generator)
        out = None if dtype == torch.float32 else master.to(dtype)
        return cls(master, grad.to(dtype), exp_avg, exp_avg_sq, out, torch.empty_like(master))


Step = Callable[[State], None]


def ours() -> Step:
    from zero.optim import adam_cpu

    def step(state: State) -> None:
        tensors = state.master, state.grad, state.exp_avg, state.exp_avg_sq, state.out
        adam_cpu.adam(*tensors, GROUP, STEP, 1.0)

    return step


def ours_8_bit() -> Step:
    """With coded moments, which are made of the state's fp32 ones by its first step."""
    from zero.optim import adam8bit, adam_cpu

    def step(state: State) -> None:
        state.coded = state.coded or adam8bit.encode(state.exp_avg, state.exp_avg_sq)
        tensors = state.master, state.grad, *state.coded, state.out
        adam_cpu.adam(*tensors, GROUP, STEP, 1.0)

    return step


def with_casts(update: Step) -> Step:
    """Add the casts that an optimizer needs if it takes fp32 gradients and makes no 16-bit copy."""

    def step(state: State) -> None:
        if state.out is None:
            state.master.grad = state.grad
            update(state)
        else:
            state.master.grad = state.buffer.copy_(state.grad)
            update(state)
            state.out.copy_(state.master)
        state.master.grad = None

    return step


def of_torch(optimizer: torch.optim.Optimizer, number: Callable[[], object]) -> Step:
    """Return the step of an optimizer with torch's state. `number`: that of the last step."""

    def update(state: State) -> None:
        moments = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        optimizer.param_groups[0]["params"] = [state.master]
        optimizer.state[state.master] = {"step": number(), **moments}
        optimizer.step()

    return with_casts(update)


def by_torch(**choice: bool) -> Step:
    optimizer = torch.optim.AdamW([torch.zeros(1)], LR, BETAS, EPS, DECAY, **choice)
    return of_torch(optimizer, lambda: torch.tensor(STEP - 1.0))


def by_compile() -> Step:
    """The formula of `zero.optim.adam_cpu`, compiled into one loop by torch.compile."""
    correction, step_size = (1 - BETAS[1] ** STEP) ** 0.5, LR / (1 - BETAS[0] ** STEP)

    @torch.compile(dynamic=True)
    def formula(master, grad, exp_avg, exp_avg_sq, out):
        wide = grad.float()
        average = exp_avg + (1 - BETAS[0]) * (wide - exp_avg)
        square = exp_avg_sq * BETAS[1] + (1 - BETAS[1]) * wide * wide
        updated = master * (1 - LR * DECAY) - step_size * average / (
            square.sqrt() / correction + EPS
        )
        exp_avg.copy_(average)
        exp_avg_sq.copy_(square)
        master.copy_(updated)
        if out is not None:
            out.copy_(updated)

    return lambda state: formula(
        state.master, state.grad, state.exp_avg, state.exp_avg_sq, state.out
    )


def deepspeed() -> Step:
    """What DeepSpeed's ZeRO-3 offload does with a sub-group: cast, C++ op, copy.

    Its unscaling pass is left out.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    print(
        "DeepSpeed builds its C++ op now, unless it is built already: a few minutes",
        file=sys.stderr,
        flush=True,
    )
    optimizer = DeepSpeedCPUAdam([torch.zeros(1)], LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    return of_torch(optimizer, lambda: STEP - 1)


def triad(state: State) -> None:
    """Not an optimizer: two fp32 reads and a write measure the machine's bandwidth."""
    torch.add(state.master, state.exp_avg, alpha=0.5, out=state.buffer)


CONTESTANTS: dict[str, Callable[[], Step]] = {
    "ours": ours,
    "ours, 8-bit moments": ours_8_bit,
    "torch fused": lambda: by_torch(fused=True),
    "torch foreach": lambda: by_torch(foreach=True),
    "torch default": by_torch,
    "torch.compile": by_compile,
    "deepspeed": deepspeed,
    "triad": lambda: triad,
}


def verify(name: str, step: Step, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless `step` computes what torch's AdamW computes."""
    before, expected, found = (State.random(4099, dtype) for _ in range(3))
    by_torch()(expected)
    step(found)
    if found.coded is not None:  # rounding the moments changes the update
        update = (expected.master - before.master).norm()
        if (found.master - expected.master).norm() > 0.05 * update:
            raise RuntimeError(f"{name} computes another update")
        return
    for field in ("master", "exp_avg", "exp_avg_sq", *(["out"] if found.out is not None else [])):
        tolerance = 2**-7 if field == "out" else 1e-5
        if not torch.allclose(
            getattr(expected, field), getattr(found, field), rtol=tolerance, atol=1e-6
        ):
            raise RuntimeError(f"{name} computes another {field}")


def timed(step: Step, state: State) -> dict[str, float]:
    repeats = max(1, LEAST // state.master.numel())
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        step(state)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall": wall / repeats, "cpu": cpu / repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, required=True)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    answers = sys.stdout
    with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):  # libraries print
        steps = {name: CONTESTANTS[name]() for name in args.contestants}
        for name, step in steps.items():
            if name != "triad":
                verify(name, step, DTYPES[args.dtype])
        state = State.random(args.numel, DTYPES[args.dtype])
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(timed(steps[line.strip()], state)), file=answers, flush=True)


if __name__ == "__main__":
    main()
