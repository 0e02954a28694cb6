"""One rank of the benchmark of the monitors: times each step, and what the monitor does after
it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

import zero
from benchmarks.launch import report
from benchmarks.models import T5_42M, build_t5, synthetic_batches

# The sizes of a T5, and sentences of 32 + 32 tokens on each rank.
MODELS = {
    "small": (
        {
            "d_model": 128,
            "d_ff": 512,
            "num_layers": 2,
            "num_heads": 4,
            "d_kv": 32,
            "vocab_size": 1024,
        },
        8,
    ),
    "42M": (T5_42M, 8),
}
WARM_UP = 4


SECTIONS = ("json_monitor", "csv_monitor")


class TimedMonitor:
    """The engine's monitor, with the seconds of its last `end_step`."""

    def __init__(self, monitor: Any):
        self._monitor = monitor
        self.wall = 0.0
        self.cpu = 0.0
        self.loss = monitor.loss

    def end_step(self) -> None:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        self._monitor.end_step()
        self.wall = time.perf_counter() - wall
        self.cpu = time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--section", choices=SECTIONS, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    sizes, batch = MODELS[args.model]
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        args.section: {"enabled": True, "output_path": args.folder},
    }
    engine = zero.initialize(model=build_t5(sizes, seed=1), config=config)[0]
    data = synthetic_batches(sizes["vocab_size"], batch, 32, 32, seed=dist.get_rank())
    engine.monitor = monitor = TimedMonitor(engine.monitor)
    found: dict[str, list[float]] = {"step": [], "wall": [], "cpu": []}
    for number in range(WARM_UP + args.steps):
        start = time.perf_counter()
        engine.backward(engine(**next(data)).loss)
        engine.step()
        if number >= WARM_UP:
            found["step"].append(time.perf_counter() - start)
            found["wall"].append(monitor.wall)
            found["cpu"].append(monitor.cpu)
    report(found)


if __name__ == "__main__":
    main()
