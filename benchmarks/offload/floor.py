"""The lower bounds of a step with offload, which `benchmarks.offload` compares variants with: plain
torch's forward and backward, and the bandwidths of host memory, of a file, and to and from the GPU.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import build
from benchmarks.step.worker import batches_of, device

# Elements of the triad's fp32 vectors; bytes of a tensor in a file, and their number; how often
# each is measured.
TRIAD_NUMEL, PIECE, PIECES, TRIES = 30_000_000, 64 << 20, 4, 5


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compute(
    model: str, batch: int, length: int, warmup: int, steps: int, dtype: torch.dtype
) -> dict[str, float]:
    """Return the median seconds of plain torch's forward and backward, and the median CPU
    seconds.
    """
    built = build(model).to(device(), dtype)
    seconds, cpu = [], []
    for tokens in islice(batches_of(built, batch, length, False, 0), warmup + steps):
        synchronize()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        built(**tokens).loss.backward()
        synchronize()
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
        built.zero_grad()
    compute, cpu = statistics.median(seconds[warmup:]), statistics.median(cpu[warmup:])
    return {"compute": compute, "compute_cpu": cpu}


def fastest(move: Callable[[], object], nbytes: int) -> float:
    """Return bytes per second of the fastest of several tries."""
    seconds = []
    for _ in range(TRIES):
        synchronize()
        begin = time.perf_counter()
        move()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return nbytes / min(seconds)


def triad() -> float:
    """Measure host memory with two fp32 reads and a write on all cores."""
    a, b, out = (torch.ones(TRIAD_NUMEL) for _ in range(3))
    torch.set_num_threads(os.cpu_count() or 1)
    return fastest(lambda: torch.add(a, b, alpha=0.5, out=out), 3 * a.nbytes)


def disk(folder: Path) -> dict[str, float]:
    """Measure reads and writes through `ScratchFile`, with all pieces in flight: each alone, and
    both beside each other.
    """
    from zero.offload.nvme import ScratchFile
    from zero.offload.pinned import HostMemory

    file, memory = ScratchFile(folder), HostMemory()
    tensors = [file.empty(PIECE // 4, torch.float32) for _ in range(2 * PIECES)]
    buffers = [memory.like(tensor).fill_(1.0) for tensor in tensors]

    def move(*starts: Callable) -> None:
        pairs = zip(PIECES * starts, tensors, buffers, strict=False)
        for transfer in [start(tensor, buffer) for start, tensor, buffer in pairs]:
            transfer.wait()

    ways = {"written": [file.write], "read": [file.read], "both": [file.read, file.write]}
    return {k: fastest(lambda w=w: move(*w), len(w) * PIECES * PIECE) for k, w in ways.items()}


def pcie() -> dict[str, float]:
    """Measure copies to and from the GPU, with pinned memory."""
    host = torch.ones(4 * PIECE, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device())
    return {
        "to_device": fastest(lambda: there.copy_(host, non_blocking=True), host.nbytes),
        "from_device": fastest(lambda: host.copy_(there, non_blocking=True), host.nbytes),
    }


def floor(folder: str, dtype: str, **task: Any) -> dict[str, float]:
    """Return wall and CPU seconds of plain compute, and bytes per second of memory, a file, and GPU
    copies.
    """
    found = compute(**task, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    found |= disk(Path(folder)) | {"triad": triad()}
    return found | (pcie() if torch.cuda.is_available() else {})
